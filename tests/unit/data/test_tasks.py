"""The tasks: disjoint prompts, right answers, and demonstrators with the stated faults."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter

import pytest

from megatron_ppo.data import char_tokenizer as chars
from megatron_ppo.data.count_long import count_long_task
from megatron_ppo.data.sort3_5 import sort3_5_task
from megatron_ppo.data.task import ANSWER_TOKEN_IDS, TaskExample, TaskSpec
from megatron_ppo.data.tasks import build_task, takes_option, train_prompts
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.rewards.build import build_scorer


@pytest.fixture(scope="module", params=["sort3_5", "count_long"])
def task(request: pytest.FixtureRequest) -> TaskSpec:
    return build_task(request.param)


def answer_ids(example: TaskExample) -> list[int]:
    return [int(part) for part in example.metadata[ANSWER_TOKEN_IDS].split()]


def test_training_and_validation_prompts_are_disjoint(task: TaskSpec) -> None:
    assert not {e.text for e in task.train} & {e.text for e in task.validation}
    assert len({e.text for e in task.validation}) == len(task.validation)


def test_a_task_is_the_same_in_every_process(task: TaskSpec) -> None:
    code = f"from megatron_ppo.data.tasks import build_task; print(build_task({task.name!r}).train[-1].text)"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert output.strip() == task.train[-1].text


def test_recorded_answers_earn_the_full_reward(task: TaskSpec) -> None:
    scorer = build_scorer(task.reward.target, task.reward.kwargs)
    for example in task.validation:
        ids = answer_ids(example)
        assert ids == chars.encode_answer(example.answer)
        assert len(ids) <= task.max_response_tokens
        assert scorer(example.prompt(0), ids) == 1.0


def test_the_demonstrator_is_imperfect_but_not_useless(task: TaskSpec) -> None:
    scorer = build_scorer(task.reward.target, task.reward.kwargs)
    assert task.demonstrate is not None
    rng = random.Random(0)
    rewards = [scorer(e.prompt(0), chars.encode_answer(task.demonstrate(rng, e))) for e in task.train[:1000]]
    # sort3_5: 0.45 x 0.60 and a little for palindromes; count_long: 0.5 x 0.5 and EOS. Standard error 0.014.
    assert 0.22 < sum(rewards) / len(rewards) < 0.36


def test_sort_has_4000_and_256_prompts_of_three_to_five_digits() -> None:
    task = sort3_5_task()
    assert (len(task.train), len(task.validation), task.max_prompt_tokens) == (4000, 256, 7)
    lengths = Counter(len(e.token_ids) - 2 for e in task.train)
    assert set(lengths) == {3, 4, 5}
    # Uniform: 1333 expected, standard deviation 30.
    assert min(lengths.values()) > 1200
    assert all(e.answer == "".join(sorted(e.text[:-1])) for e in task.train)


def test_sort_demonstrations_have_the_stated_shares_of_faults() -> None:
    task = sort3_5_task(num_train=4000)
    rng = random.Random(1)
    distinct = [e for e in task.train if e.answer != e.answer[::-1]]
    shown = [(e, task.demonstrate(rng, e)) for e in distinct if task.demonstrate is not None]
    descending = sum(text.rstrip(".") == e.answer[::-1] for e, text in shown) / len(shown)
    dotted = sum(text.endswith(".") for _, text in shown) / len(shown)
    # Standard error 0.008; the bounds are five of them.
    assert descending == pytest.approx(0.55, abs=0.04)
    assert dotted == pytest.approx(0.40, abs=0.04)


def test_long_answers_have_64_to_128_tokens_in_either_direction() -> None:
    task = count_long_task()
    assert task.max_prompt_tokens == 6
    rng = random.Random(2)
    lengths = set()
    for example in task.train:
        assert task.demonstrate is not None
        lengths |= {len(answer_ids(example)), len(chars.encode_answer(task.demonstrate(rng, example)))}
    assert (min(lengths), max(lengths)) == (66, 126)
    assert task.max_response_tokens == 126


def test_a_long_answer_is_the_whole_count() -> None:
    example = next(e for e in count_long_task().train if e.text.endswith("87="))
    tag = example.text[:2]
    assert example.answer == "".join(f"{tag}{n}," for n in range(87, 100))


def test_more_prompts_than_exist_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"data\.num_train \+ data\.num_validation: got 9000 \+ 64; must be <= 8788"
    ):
        count_long_task(num_train=9000)
    with pytest.raises(ConfigError, match=r"data\.num_validation: got 60000; must be <= 55500"):
        sort3_5_task(num_validation=60000)


def test_an_unknown_task_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"'sort3_6' is unknown; known: .*did you mean 'sort3_5'"):
        build_task("sort3_6")
    with pytest.raises(ConfigError, match=r"'no\.such\.task' cannot be imported"):
        build_task("no.such.task")


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.num_trian is no option of task 'sort3_5'; it takes seed"):
        build_task("sort3_5", num_trian=3)
    assert takes_option("sort3_5", "tokenizer_dir")
    assert not takes_option("sort3_5", "min_digits")


def test_a_task_of_ones_own_is_named_by_its_dotted_path() -> None:
    assert build_task("megatron_ppo.data.sort3_5.sort3_5_task", num_train=5).name == "sort3_5"


def test_a_task_without_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 training and 256 validation prompts"):
        sort3_5_task(num_train=0)


def test_a_shared_prompt_is_refused() -> None:
    task = sort3_5_task(num_train=3, num_validation=3)
    with pytest.raises(ConfigError, match="1 validation prompts are also training prompts"):
        TaskSpec(
            name="leaky",
            train=task.train,
            validation=task.train[:1],
            reward=task.reward,
            pad_token_id=0,
            eos_token_id=2,
            max_response_tokens=6,
        )


def test_the_collectors_stream_loads_no_torch_and_no_transformers() -> None:
    code = (
        "import sys\n"
        "from megatron_ppo.data.tasks import build_task, train_prompts\n"
        "from megatron_ppo.rewards.build import build_scorer\n"
        "task = build_task('sort3_5')\n"
        "prompt = train_prompts(task='sort3_5', stream_seed=1).prompt_at(0)\n"
        "build_scorer(task.reward.target, task.reward.kwargs)(prompt, [2])\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'ray'} & set(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert output.strip() == "[]"


def test_the_stream_seed_is_not_the_tasks_seed() -> None:
    one = train_prompts(task="sort3_5", stream_seed=1, num_train=50)
    two = train_prompts(task="sort3_5", stream_seed=2, num_train=50)
    first, second = ([s.prompt_at(q).text for q in range(50)] for s in (one, two))
    assert first != second
    assert sorted(first) == sorted(second)


def test_a_prompt_longer_than_declared_is_refused() -> None:
    task = sort3_5_task(num_train=50, num_validation=5)
    task.check_prompt_lengths(task.max_prompt_tokens)
    with pytest.raises(ConfigError, match=r"data\.max_prompt_tokens: got 6; must be >= 7"):
        task.check_prompt_lengths(6)
