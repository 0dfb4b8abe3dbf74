"""chain_sum with a small byte-level tokenizer; the package reasoning-gym is the real one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from megatron_ppo.data.bare_package import import_module_only
from megatron_ppo.data.chain_sum import SOLVED_EXAMPLES, chain_sum_task, newline_token_ids
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.rewards.build import build_scorer

pytest.importorskip("yaml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a byte-level tokenizer that also has a token of two newlines, as real ones do."""
    path = tmp_path_factory.mktemp("bytes")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, "ĊĊ"])}
    tokenizer = Tokenizer(models.BPE(vocab, [("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    return path


def test_the_prompt_is_three_solved_examples_and_the_expression(folder: Path) -> None:
    task = chain_sum_task(tokenizer_dir=folder, num_train=100, num_validation=20)
    assert (len(task.train), len(task.validation)) == (100, 20)
    for example in (*task.train, *task.validation):
        expression = example.metadata["expression"]
        assert example.text == f"{SOLVED_EXAMPLES}{expression} ="
        left, operator, right = expression.split(" ")
        assert int(example.answer) == int(left) + (int(right) if operator == "+" else -int(right))
        assert len(example.token_ids) <= task.max_prompt_tokens


def test_expressions_of_validation_are_distinct_and_never_trained_on(folder: Path) -> None:
    task = chain_sum_task(tokenizer_dir=folder, num_train=500, num_validation=40)
    held_out = {e.metadata["expression"] for e in task.validation}
    assert len(held_out) == 40
    assert not held_out & {e.metadata["expression"] for e in task.train}


def test_right_answers_earn_the_reward_and_fit_the_limit(folder: Path) -> None:
    task = chain_sum_task(tokenizer_dir=folder, num_train=100, num_validation=20)
    scorer = build_scorer(task.reward.target, task.reward.kwargs)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for index, example in enumerate(task.train):
        ids = tokenizer.encode(f" {example.answer}\n").ids
        assert len(ids) <= task.max_response_tokens
        assert scorer(example.prompt(index), ids) == 1.0
        assert scorer(example.prompt(index), tokenizer.encode(f" {example.answer}1\n").ids) == 0.0


def test_every_token_with_a_newline_stops(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert newline_token_ids(tokenizer) == tuple(
        sorted(i for i in (tokenizer.token_to_id("Ċ"), tokenizer.token_to_id("ĊĊ")) if i is not None)
    )


def test_eos_pads_when_the_tokenizer_names_no_padding_token(folder: Path) -> None:
    task = chain_sum_task(tokenizer_dir=folder, num_train=5, num_validation=5)
    assert task.eos_token_id == task.pad_token_id == 257


def test_more_expressions_than_exist_are_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"too few expressions for data\.num_train 10 and data\.num_validation 250"
    ):
        chain_sum_task(tokenizer_dir=folder, num_train=10, num_validation=250, max_digits=1)


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json does not exist"):
        chain_sum_task(tokenizer_dir=tmp_path)


def test_a_folder_that_names_no_eos_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(ConfigError, match="must name an eos_token of the tokenizer, got None"):
        chain_sum_task(tokenizer_dir=tmp_path, num_train=1, num_validation=1)


def test_the_task_loads_neither_the_whole_package_nor_torch(folder: Path) -> None:
    code = (
        "import sys\n"
        "from megatron_ppo.data.tasks import train_prompts\n"
        f"options = {{'tokenizer_dir': {str(folder)!r}, 'num_train': 9}}\n"
        "train_prompts(task='chain_sum', stream_seed=1, **options).prompt_at(0)\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'reasoning_gym'} & set(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert output.strip() == "[]"


def test_a_package_that_is_missing_is_named_with_the_remedy() -> None:
    with pytest.raises(ModuleNotFoundError, match="'no_such_package' is not installed; do this"):
        import_module_only("no_such_package.part", install_hint="do this")


def test_a_package_is_imported_in_the_ordinary_way_afterwards(tmp_path: Path) -> None:
    root = tmp_path / "heavy_package"
    (root / "inner").mkdir(parents=True)
    (root / "__init__.py").write_text("WHOLE = True\n")
    (root / "inner" / "__init__.py").write_text("raise ImportError('needs a compiler')\n")
    (root / "shared.py").write_text("VALUE = 3\n")
    (root / "inner" / "light.py").write_text("from ..shared import VALUE\n")
    sys.path.insert(0, str(tmp_path))
    try:
        light = import_module_only("heavy_package.inner.light", install_hint="")
        assert light.VALUE == 3
        assert not [name for name in sys.modules if name.startswith("heavy_package")]
        import heavy_package  # type: ignore[import-not-found]

        assert heavy_package.WHOLE
        with pytest.raises(ImportError, match="needs a compiler"):
            import_module_only("heavy_package.inner.light", install_hint="")
    finally:
        sys.path.remove(str(tmp_path))
        for name in [name for name in sys.modules if name.startswith("heavy_package")]:
            del sys.modules[name]
