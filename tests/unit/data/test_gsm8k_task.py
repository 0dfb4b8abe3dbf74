"""GSM8K from files, with a small byte-level tokenizer and a chat template of its own."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from megatron_ppo.data.chat_prompt import chat_renderer
from megatron_ppo.data.gsm8k import INSTRUCTION, gsm8k_task, right_answer
from megatron_ppo.data.tasks import build_task, train_prompts
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.rewards.build import build_scorer

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}{% endfor %}\n"
    "{% if add_generation_prompt %}\n<assistant>{% endif %}"
)
ROWS = [
    ("Ann has 3 apples and buys 4. How many?", "3 + 4 = <<3+4=7>>7\n#### 7"),
    ("A car costs $1,200 more than $34. How much?", "1200 + 34 = 1234\n#### 1,234"),
    ("It is 3 degrees and falls by 8. How cold?", "3 - 8 = -5\n#### -5"),
    ("Half of 5?", "5 / 2 = 2.5\n#### 2.5"),
]


def write_rows(path: Path, rows: list[tuple[str, str]]) -> Path:
    text = "".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    path = tmp_path / "model"
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"eos_token": {"content": "<end>"}, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return {
        "train_path": write_rows(tmp_path / "train.jsonl", ROWS[:3]),
        "validation_path": write_rows(tmp_path / "test.jsonl.gz", ROWS[3:]),
    }


def test_prompt_is_instruction_and_question_in_the_chat_format(folder: Path, files: dict[str, Path]) -> None:
    task = gsm8k_task(tokenizer_dir=folder, **files)
    example = task.train[0]
    assert example.text == f"<user>{INSTRUCTION}\n\n{ROWS[0][0]}<end><assistant>"  # newlines after blocks go
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(list(example.token_ids), skip_special_tokens=False) == example.text
    assert list(example.token_ids).count(task.eos_token_id) == 1  # <end> is one token, not five characters
    assert [e.answer for e in (*task.train, *task.validation)] == ["7", "1,234", "-5", "2.5"]
    bare = gsm8k_task(tokenizer_dir=folder, chat_template=False, instruction="", **files)
    assert bare.train[0].text == ROWS[0][0]


def test_the_data_sets_own_solutions_earn_the_reward_and_fit_the_limit(
    folder: Path, files: dict[str, Path]
) -> None:
    task = gsm8k_task(tokenizer_dir=folder, **files)
    scorer = build_scorer(task.reward.target, task.reward.kwargs)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for example, (_, solution) in zip((*task.train, *task.validation), ROWS, strict=True):
        ids = [*tokenizer.encode(solution).ids, task.eos_token_id]
        assert len(ids) <= task.max_response_tokens
        assert scorer(example.prompt(0), ids) == 1.0
        other = [*tokenizer.encode(ROWS[0][1] + "1").ids, task.eos_token_id]
        assert scorer(example.prompt(0), other) == 0.0


def test_stream_finds_the_same_prompt_at_an_ordinal_in_every_process(
    folder: Path, files: dict[str, Path]
) -> None:
    options = {"task": "gsm8k", "tokenizer_dir": str(folder), **{k: str(v) for k, v in files.items()}}
    first, second = (train_prompts(stream_seed=5, **options) for _ in range(2))
    assert [first.prompt_at(n).text for n in range(9)] == [second.prompt_at(n).text for n in range(9)]
    assert {first.prompt_at(n).answer for n in range(3)} == {"7", "1,234", "-5"}


def test_fewer_rows_are_chosen_by_the_seed_and_keep_their_order(
    folder: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    many = write_rows(tmp_path / "many.jsonl", [(f"question {n}?", f"#### {n}") for n in range(50)])
    paths = {**files, "train_path": many}
    picked = [
        [e.answer for e in gsm8k_task(**paths, tokenizer_dir=folder, num_train=10, seed=seed).train]
        for seed in (1, 1, 2)
    ]
    assert picked[0] == picked[1] != picked[2]
    assert len(picked[0]) == 10
    assert picked[0] == sorted(picked[0], key=int)


def test_a_held_out_question_is_not_trained_on(folder: Path, tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", ROWS)
    held_out = write_rows(tmp_path / "test.jsonl", [ROWS[1], (f"  {ROWS[2][0]} ", ROWS[2][1])])
    task = gsm8k_task(tokenizer_dir=folder, train_path=train, validation_path=held_out)
    assert [e.answer for e in task.train] == ["7", "2.5"]
    assert [e.answer for e in task.validation] == ["1,234", "-5"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.jsonl", None, r"data\.train_path: got '.*gone\.jsonl', which does not exist"),
        ("rows.csv", "question,answer", r"got '.*rows\.csv'; allowed: \.jsonl, "),
        (
            "bad.jsonl",
            '{"question": "q", "answer": "#### 1"}\n{"question"',
            "line 2 of .*bad.jsonl is not JSON",
        ),
        (
            "column.jsonl",
            '{"question": "q", "solution": "#### 1"}',
            "row 1 .*no text in column 'answer', it has",
        ),
        ("list.jsonl", "[1]", "row 1 .*no text in column 'question', it has list"),
        ("number.jsonl", '{"question": "q", "answer": 1}', "no text in column 'answer'"),
        (
            "unmarked.jsonl",
            '{"question": "q", "answer": "it is 1"}',
            "must end with '#### number', got 'it is 1'",
        ),
        ("words.jsonl", '{"question": "q", "answer": "#### many"}', "must end with '#### number'"),
        ("empty.jsonl", "\n", "has no rows"),
    ],
)
def test_data_that_cannot_be_used_names_key_file_and_row(
    folder: Path, files: dict[str, Path], tmp_path: Path, name: str, content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        gsm8k_task(tokenizer_dir=folder, **{**files, "train_path": tmp_path / name})


def test_empty_folder_of_tables_is_refused(folder: Path, files: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    with pytest.raises(ConfigError, match="holds no data; allowed"):
        gsm8k_task(tokenizer_dir=folder, **{**files, "train_path": tmp_path / "tables"})


def test_tables_of_the_datasets_package_are_read(
    folder: Path, files: dict[str, Path], tmp_path: Path
) -> None:
    """Where pyarrow is missing, the message says what to install; JSON lines need nothing."""
    table = tmp_path / "train.parquet"
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        table.write_bytes(b"PAR1")
        with pytest.raises(ConfigError, match="needs the package pyarrow"):
            gsm8k_task(tokenizer_dir=folder, **{**files, "train_path": table})
        return
    rows = pyarrow.table({"question": [q for q, _ in ROWS[:3]], "answer": [a for _, a in ROWS[:3]]})
    pyarrow.parquet.write_table(rows, table)
    saved = tmp_path / "saved"
    saved.mkdir()
    with pyarrow.ipc.new_stream(str(saved / "data-00000-of-00001.arrow"), rows.schema) as stream:
        stream.write_table(rows)
    for path in (table, saved):
        task = gsm8k_task(tokenizer_dir=folder, **{**files, "train_path": path})
        assert [e.answer for e in task.train] == ["7", "1,234", "-5"]
    table.write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="cannot be read"):
        gsm8k_task(tokenizer_dir=folder, **{**files, "train_path": table})


def test_template_in_a_file_of_its_own_is_used(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}|")
    assert chat_renderer(folder)("hello") == "hello|"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template .*data.chat_template=false"),
        ("{% for", "cannot be read"),
        ("{{ raise_exception('only assistants speak') }}", "refuses a user's message: only assistants speak"),
        ("{{ messages.append(1) }}", "refuses"),  # the sandbox lets a template change nothing
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses"),
    ],
)
def test_folder_whose_template_cannot_be_used_is_refused(
    folder: Path, template: str | None, message: str
) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    with pytest.raises(ConfigError, match=message):
        chat_renderer(folder)("hello")


def test_named_templates_have_a_default(folder: Path) -> None:
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d{{ eos_token }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named, "eos_token": "<end>"}))
    assert chat_renderer(folder)("hello") == "d<end>"


def test_right_answer_is_behind_the_last_mark() -> None:
    assert right_answer("1 #### 2\n#### 3") == "3"
    assert right_answer("3") is None


def test_unknown_option_is_refused(folder: Path, files: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"data\.digits is no option of task 'gsm8k'"):
        build_task("gsm8k", tokenizer_dir=folder, digits=3, **files)
