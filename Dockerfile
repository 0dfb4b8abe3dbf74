# The GPU set: vLLM, Megatron-Core, Transformer Engine and NVIDIA Apex on CUDA 13, Python 3.12.
#
#   docker build -t megatron-ppo .
#   docker run --gpus all --shm-size=16g -v "$PWD/outputs:/home/trainer/megatron_ppo/outputs" megatron-ppo \
#       torchrun --nproc-per-node=4 scripts/train_async_ppo.py +experiment=megatron_40step
#
# The versions in requirements/gpu.txt were resolved together but never built or run: there was no GPU. Ray keeps its
# object store in /dev/shm, hence --shm-size. The container's user has id 1000; the mounted folder must be writable
# for it.
ARG CUDA_IMAGE=nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04
FROM ${CUDA_IMAGE}

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        build-essential git ninja-build python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*

# Ubuntu 24.04 images come with a user of id 1000; it makes room for ours.
RUN (userdel --remove ubuntu || true) && useradd --create-home --uid 1000 trainer \
    && install -d -o trainer -g trainer /opt/venv
USER trainer
WORKDIR /home/trainer/megatron_ppo
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 \
    CUDA_HOME=/usr/local/cuda
# Architectures to compile for, and parallel compilers; Hopper and Blackwell by default.
ARG TORCH_CUDA_ARCH_LIST="9.0 10.0"
ARG MAX_JOBS=8
ENV TORCH_CUDA_ARCH_LIST=${TORCH_CUDA_ARCH_LIST} MAX_JOBS=${MAX_JOBS}

# torch first: Transformer Engine and Apex compile against it, without build isolation.
COPY --chown=trainer requirements/gpu.txt requirements/gpu-nodeps.txt requirements/
RUN python3.12 -m venv /opt/venv \
    && pip install setuptools==84.2.1 wheel packaging pybind11 "$(grep '^torch==' requirements/gpu.txt)" \
    && pip install --no-build-isolation -r requirements/gpu.txt \
    && pip install --no-deps -r requirements/gpu-nodeps.txt

# Pin APEX_REVISION to a commit for a reproducible image. Both ways of asking for the extensions are given, because
# revisions differ in which one they read.
ARG APEX_REPOSITORY=https://github.com/NVIDIA/apex
ARG APEX_REVISION=master
RUN git clone "${APEX_REPOSITORY}" /tmp/apex \
    && git -C /tmp/apex checkout "${APEX_REVISION}" \
    && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 pip install --no-build-isolation \
        --config-settings "--build-option=--cpp_ext" --config-settings "--build-option=--cuda_ext" /tmp/apex \
    && rm -rf /tmp/apex

COPY --chown=trainer . .
RUN pip install --no-deps --no-build-isolation -e .

ENV OMP_NUM_THREADS=1
CMD ["python", "scripts/doctor.py"]
