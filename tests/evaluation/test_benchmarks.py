"""Known benchmarks: their rows on the hub and in files, the templates of base models, and the hub's cache."""

import base64
import json
import pickle
import zlib
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args

import huggingface_hub.constants
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from local_http import Handler, running

from rlplus.train.config import BENCHMARKS, DataConfig, EvaluationConfig, ValidationConfig, benchmark_name
from rlplus.train.data import byte_tokenizer, found_columns, load_examples, load_problems
from rlplus.train.data.prompts import TEMPLATES
from rlplus.train.reward.graders.choice import choice

TESTS = [{"input": "1", "output": "2", "testtype": "stdin"}, {"input": "3", "output": "4", "testtype": "stdin"}]
PACKED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(TESTS[1:])))).decode()
ROWS: dict[str, dict[str, Any]] = {
    "math500": {"problem": "1+1?", "answer": ["2"]},
    "arc_c": {"question": "Which?", "choices": {"text": ["x", "y", "z"], "label": ["1", "2", "3"]}, "answerKey": "3"},
    "gpqa_diamond": {
        "Question": "Which one?", "Correct Answer": " right\n", "Incorrect Answer 1": "p", "Incorrect Answer 2": "q",
        "Incorrect Answer 3": "r",
    },
    "mmlu_pro": {"question": "Which?", "options": list("klmnopqrst"), "answer": "J"},
    "gsm8k": {"question": "How many?", "answer": "Half of 3,200 is 3200/2 = <<3200/2=1600>>1,600.\n#### 1,600"},
    "humaneval": {"prompt": "def f(x):\n", "test": "def check(f):\n    assert f(1) == 1", "entry_point": "f"},
    "leetcode": {"prompt_sft": "Double it.", "test": "assert Solution().f(1) == 2"},
    "livecodebench": {
        "question_content": "Add one.", "starter_code": "", "public_test_cases": json.dumps(TESTS[:1]),
        "private_test_cases": PACKED, "metadata": "{}",
    },
}  # fmt: skip


def text(tokens: Any) -> str:
    return bytes(tokens).decode()


def test_the_papers_twelve_and_gsm8k_are_known_and_every_layout_is_used() -> None:
    assert set(BENCHMARKS) == {
        "aime24", "aime25", "amc", "math500", "minerva", "olympiadbench", "humaneval", "leetcode", "livecodebench",
        "arc_c", "gpqa_diamond", "mmlu_pro", "gsm8k",
    }  # fmt: skip
    assert {entry.layout for entry in BENCHMARKS.values()} == {BENCHMARKS[name].layout for name in ROWS}
    assert [benchmark_name(name) for name in ("aime", "math", "olympiad_bench", "gpqa", "amc", "other")] == [
        "aime24", "math500", "olympiadbench", "gpqa_diamond", "amc", None,
    ]  # fmt: skip


def read(name: str, **changed: Any) -> tuple[str, str]:
    return BENCHMARKS[name].layout(ROWS[name] | changed)


def test_layouts() -> None:
    asked = {name: read(name) for name in ROWS}
    assert asked["math500"] == ("1+1?", "2")
    assert asked["arc_c"] == ("Which?\n\nA) x\nB) y\nC) z", "C")
    assert asked["mmlu_pro"][1] == "J"
    assert asked["gsm8k"] == ("How many?", "1600")
    assert asked["mmlu_pro"][0].endswith("\nJ) t")
    question, answer = asked["gpqa_diamond"]
    assert f"\n{answer}) right" in question
    assert question.startswith("Answer the following multiple choice question. The last line")
    assert json.loads(asked["humaneval"][1]) == {
        "before": "def f(x):\n", "after": "def check(f):\n    assert f(1) == 1\ncheck(f)\n", "function": "f",
    }  # fmt: skip
    assert json.loads(asked["leetcode"][1]) == {"after": "assert Solution().f(1) == 2"}
    assert json.loads(asked["livecodebench"][1]) == {"cases": [["1", "2"], ["3", "4"]], "function": None}
    assert all("```python" in asked[name][0] for name in ("humaneval", "leetcode", "livecodebench"))


def test_the_right_option_of_gpqa_is_not_always_in_one_place() -> None:
    answers = {read("gpqa_diamond", Question=f"Which of {i}?")[1] for i in range(64)}
    assert answers == set("ABCD")
    assert read("gpqa_diamond") == read("gpqa_diamond")


def test_pickled_tests_run_no_code() -> None:
    evil = base64.b64encode(zlib.compress(b"cos\nsystem\n(S'true'\ntR.")).decode()
    with pytest.raises(ValueError, match=r"want a pickled text as LiveCodeBench's private tests; got os.system"):
        read("livecodebench", private_test_cases=evil)


# Files


def evaluation(path: Path | str, benchmarks: list[str], **data: Any) -> EvaluationConfig:
    layout = {"answer": "reward_model.ground_truth", "benchmark": "data_source"}
    return EvaluationConfig(benchmarks=benchmarks, data=DataConfig(path=str(path), **layout | data))


def verl_row(source: str, question: str, answer: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": "Think."}, {"role": "user", "content": question}]
    return {"data_source": source, "prompt": messages, "reward_model": {"ground_truth": answer, "style": "rule"}}


def test_benchmarks_of_a_file_in_verls_layout(tmp_path: Path) -> None:
    """Their rows are chosen by name, repeated ones are one problem, and the others are left out."""
    rows = [verl_row("aime", f"p{i % 2}", str(i % 2)) for i in range(8)]
    rows += [verl_row("gpqa", "q\nA) x\nB) y", "B"), verl_row("amc", "r", "142.0")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "all.parquet")
    problems = load_problems(evaluation(tmp_path / "all.parquet", ["gpqa_diamond", "aime24"]), byte_tokenizer())
    assert [(e.benchmark, e.rows, e.answer) for e in problems] == [
        ("aime24", 4, "0"), ("aime24", 4, "1"), ("gpqa_diamond", 1, "B"),
    ]  # fmt: skip
    assert text(problems[0].prompt) == "<|system|>\nThink.\n<|user|>\np0\n<|assistant|>\n"
    with pytest.raises(ValueError, match=r"all.parquet: want rows of minerva; got aime, gpqa, amc"):
        load_problems(evaluation(tmp_path / "all.parquet", ["minerva", "amc"]), byte_tokenizer())


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_file_as_the_benchmark_has_it_on_the_hub(tmp_path: Path, name: str) -> None:
    row = next(row for known, row in ROWS.items() if BENCHMARKS[known].layout is BENCHMARKS[name].layout)
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    (problem,) = load_problems(evaluation(tmp_path / "x.jsonl", [name]), byte_tokenizer())
    question, answer = BENCHMARKS[name].layout(row)
    assert (text(problem.prompt), problem.answer, problem.benchmark) == (question, answer, name)
    if BENCHMARKS[name].grader == "choice":
        assert choice(answer, answer, {})[0] == 1


def test_a_benchmark_loses_no_problem(tmp_path: Path) -> None:
    rows = [{"prompt": "p" * 20 ** (i == 7), "answer": "1"} for i in range(30)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = evaluation(tmp_path / "x.jsonl", ["amc"], answer="answer", benchmark=None, max_prompt_length=8)
    with pytest.raises(ValueError, match=r"3.3% of the rows would be dropped, .* prompts longer than 8 tokens"):
        load_problems(config, byte_tokenizer())


def test_a_row_without_the_benchmarks_columns_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"question": "q"}')
    with pytest.raises(ValueError, match=r"x.jsonl:1: want a column 'answer'; got question"):
        load_problems(evaluation(tmp_path / "x.jsonl", ["amc"]), byte_tokenizer())

    row = {"question": "q", **verl_row("gpqa", "q", "B")}
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=r"x.jsonl:1: want a column 'quest'; got .*; nearest: question"):
        load_problems(evaluation(tmp_path / "x.jsonl", ["gpqa_diamond"], prompt="quest"), byte_tokenizer())


def test_the_key_of_a_column_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "q", "answer": "1"}')
    data = {"path": str(tmp_path / "x.jsonl"), "answer": "reward_model.ground_truth"}
    for section, kind in {"evaluation": EvaluationConfig, "validation": ValidationConfig}.items():
        config = kind.model_validate({"data": data})
        with pytest.raises(ValueError, match=rf"got prompt, answer .*\({section}\.data\.answer names it\)"):
            load_problems(config, byte_tokenizer())


def test_a_file_of_prompts_and_answers_needs_no_keys(tmp_path: Path) -> None:
    """In place of verl's columns, where the file does not have these."""
    path = tmp_path / "x.jsonl"
    verl = DataConfig.model_validate(
        {"path": str(path), "answer": "reward_model.ground_truth", "benchmark": "data_source"}
    )
    cases: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"prompt": "q", "answer": "1"}, {"answer": "answer", "benchmark": "null"}),
        ({"prompt": "q", "answer": "1", "data_source": "x"}, {"answer": "answer"}),
        (verl_row("gpqa", "q", "B") | {"answer": "1"}, {}),
    ]
    for row, found in cases:
        path.write_text(json.dumps(row))
        assert found_columns(verl, several=False) == found
    path.write_text('{"prompt": "q", "answer": "1"}')
    assert found_columns(verl, several=True) == {"answer": "answer"}


def test_text_for_a_model_that_chats_is_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "q", "answer": "1"}\n' * 3)
    for data, expected in [({}, True), ({"chat": True}, False), ({"template": "none"}, False)]:
        config = EvaluationConfig.model_validate({"data": {"path": str(tmp_path / "x.jsonl")} | data})
        for chat_expected in (False, True):
            caplog.clear()
            load_problems(config, byte_tokenizer(), chat_expected=chat_expected)
            noted = "3 prompts are text, given to the model as it is" in caplog.text
            assert noted == (expected and chat_expected)
            assert not noted or "evaluation.data.chat=true" in caplog.text


def test_rows_of_other_benchmarks_count_for_nothing(tmp_path: Path) -> None:
    """They may be too long, and do not hide that the benchmark has none."""
    rows = [verl_row("gpqa", "q" * 99, "B"), verl_row("amc", "r", "1")]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "all.parquet")

    def load(*names: str) -> list[str]:
        config = evaluation(tmp_path / "all.parquet", [*names], max_prompt_length=64)
        return [example.answer for example in load_problems(config, byte_tokenizer())]

    assert load("amc") == ["1"]
    with pytest.raises(ValueError, match=r"all.parquet: want rows of arc_c; got gpqa, amc"):
        load("arc_c")
    with pytest.raises(ValueError, match=r"all.parquet: want rows of arc_c; got gpqa, amc"):
        load("arc_c", "gpqa_diamond")
    with pytest.raises(ValueError, match=r"100.0% of the rows would be dropped"):
        load("gpqa_diamond")


# Templates


def test_templates_are_those_of_luffys_evaluation() -> None:
    """Written out from eval_scripts/generate_vllm.py of github.com/ElliottYan/LUFFY."""
    start = "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. "
    start += "The assistant first thinks about the reasoning process in the mind and then provides the user with the "
    start += (
        "answer. The reasoning process and answer are enclosed within <think> </think> and <answer> </answer> tags,"
    )
    start += " respectively, i.e., <think> reasoning process here </think> <answer> answer here </answer>. User: "
    system = "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
    written = {
        "qwen": system + "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
        "simplerl": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{question}\nPlease "
        "reason step by step, and put your final answer within\\boxed{{}}.<|im_end|>\n<|im_start|>assistant\n",
        "prime": start + "{question}\n\nPresent the answer in LaTex format: \\boxed{Your answer}. Assistant:",
        "none": "{question}",
    }
    assert written == TEMPLATES
    assert {"own", *TEMPLATES} == set(get_args(DataConfig.model_fields["template"].annotation))


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_is_the_whole_prompt(tmp_path: Path, template: Any) -> None:
    question = "What is {x} in \\boxed{question}?"
    rows = [verl_row("aime", question, "1"), {"prompt": question, "answer": "1"}]
    for i, row in enumerate(rows):
        (tmp_path / f"{i}.jsonl").write_text(json.dumps(row))
        answer = "reward_model.ground_truth" if i == 0 else "answer"
        config = DataConfig(path=str(tmp_path / f"{i}.jsonl"), answer=answer, template=template, response_prefix="<t>")
        (example,) = load_examples(config, byte_tokenizer(), max_demonstration_length=8)[0]
        assert text(example.prompt) == TEMPLATES[template].replace("{question}", question, 1) + "<t>"


def test_a_template_wants_one_question(tmp_path: Path) -> None:
    row = verl_row("aime", "q", "1")
    row["prompt"].append({"role": "assistant", "content": "a"})
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    config = DataConfig(path=str(tmp_path / "x.jsonl"), answer="reward_model.ground_truth", template="qwen")
    with pytest.raises(
        ValueError, match=r"x.jsonl:1: data.template wants a prompt that is text or has one user message"
    ):
        load_examples(config, byte_tokenizer(), max_demonstration_length=8)
    for also in ({"chat": True}, {"system_prompt": "s"}):
        with pytest.raises(ValueError, match="template qwen is the whole prompt: leave chat and system_prompt out"):
            DataConfig(path="x.jsonl", template="qwen", **also)


# The hub


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, as its own client fills it; the tests are offline."""
    folder = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    return folder


def cached(cache: Path, name: str, file: str, rows: list[dict[str, Any]]) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    data = cache / f"datasets--{name.replace('/', '--')}"
    path = data / "snapshots" / commit / file
    path.parent.mkdir(parents=True, exist_ok=True)
    ref = data / "refs" / ("refs/convert/parquet" if path.suffix == ".parquet" else "main")
    ref.parent.mkdir(parents=True, exist_ok=True)
    ref.write_text(commit)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prompts(path: str | list[str]) -> list[str]:
    config = DataConfig(path=path, max_dropped_share=0.0)
    return [text(e.prompt) for e in load_examples(config, byte_tokenizer(), max_demonstration_length=8)[0]]


def test_a_split_of_the_hub_is_read_from_its_cache(cache: Path) -> None:
    for file in ("default/test/0000.parquet", "default/test/0001.parquet", "default/train/0000.parquet"):
        cached(cache, "some/set", file, [{"prompt": file, "answer": "1"}])
    assert prompts("hf://some/set/test") == ["default/test/0000.parquet", "default/test/0001.parquet"]
    assert prompts("hf://some/set/default/train") == ["default/train/0000.parquet"]
    assert prompts(["hf://some/set/train", "hf://some/set/test"])[0] == "default/train/0000.parquet"
    cached(cache, "other/set", "data/x.jsonl", [{"prompt": "file", "answer": "1"}])
    assert prompts("hf://other/set/data/x.jsonl") == ["file"]


def test_a_split_is_downloaded_from_the_hub_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the hub's own client, from a server that answers as the hub does: a branch's commit, its files, each file."""
    commit, asked = "0123456789abcdef0123456789abcdef01234567", list[str]()
    rows = {name: json.dumps({"prompt": name, "answer": "1"}) + "\n" for name in ("data/x.jsonl", "data/y.jsonl")}

    class Hub(Handler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            file = path.removeprefix(f"/datasets/some/set/resolve/{commit}/")
            answers: dict[str, Any] = {
                "/api/datasets/some/set/revision/main": {"id": "some/set", "sha": commit, "siblings": []},
                f"/api/datasets/some/set/tree/{commit}": [
                    {"type": "file", "path": name, "size": len(row), "oid": name} for name, row in rows.items()
                ],
            }
            if self.command == "GET":
                asked.append(file)
            known = file in rows or path in answers
            self.answer(
                rows[file].encode() if file in rows else answers.get(path, {}),
                200 if known else 404,
                {"ETag": '"e"', "X-Repo-Commit": commit},
            )

        do_HEAD = do_GET

    with running(ThreadingHTTPServer(("127.0.0.1", 0), Hub)) as endpoint:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        for _ in range(2):
            assert prompts("hf://some/set/data/x.jsonl") == ["data/x.jsonl"]
        with pytest.raises(ValueError, match=r"want hf://no/set/test; no/set could not be loaded from the hub: .*404"):
            prompts("hf://no/set/test")
    assert asked.count("data/x.jsonl") == 1
    assert "data/y.jsonl" not in asked


def test_what_the_hub_cannot_give_is_said_in_one_line(cache: Path) -> None:
    cached(cache, "some/set", "a/test/0.parquet", [{"prompt": "p", "answer": "1"}])
    cached(cache, "some/set", "b/test/0.parquet", [{"prompt": "p", "answer": "1"}])
    cases = [
        ("hf://no/one/test", r"want a data set as data.path hf://no/one/test: HF_HUB_OFFLINE is set, and the cache \S+ "
         r"does not have it: download it there, or give a file"),
        ("hf://some/set/test", r"want hf://some/set/CONFIGURATION/test, as it has several: a, b"),
        ("hf://some/set/a/dev", r"want hf://some/set/a/dev: some/set has no split 'a/dev'; "
         r"loaded before: a/test, b/test"),
        ("hf://some/set", r"want a data set of the hub as hf://owner/name/split; got hf://some/set"),
    ]  # fmt: skip
    for path, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            prompts(path)
        assert "\n" not in str(caught.value)


def test_benchmarks_come_from_the_hub(cache: Path) -> None:
    for split in ("aime", "amc"):
        rows = [{"problem": f"{split} {i}", "answer": [str(i)]} for i in range(2)]
        cached(cache, "lkevinzc/math-eval", f"default/{split}/0000.parquet", rows)
    cached(cache, "allenai/ai2_arc", "ARC-Challenge/test/0000.parquet", [ROWS["arc_c"]])
    config = EvaluationConfig(benchmarks=["arc_c", "amc", "aime24"])
    problems = load_problems(config, byte_tokenizer())
    assert [(e.benchmark, e.index, e.answer) for e in problems] == [
        ("arc_c", 0, "C"), ("amc", 0, "0"), ("amc", 1, "1"), ("aime24", 0, "0"), ("aime24", 1, "1"),
    ]  # fmt: skip
    assert text(problems[1].prompt) == "amc 0"


def test_configurations_of_benchmarks() -> None:
    with pytest.raises(ValueError, match=r"want names from aime24, .*; got 'aime26'"):
        EvaluationConfig(benchmarks=["aime26"])
    with pytest.raises(ValueError, match="data has no path: want one, or benchmarks"):
        EvaluationConfig(data=DataConfig())
    with pytest.raises(ValueError, match=r"want data.benchmark, the column that names the benchmark of a row"):
        EvaluationConfig(benchmarks=["aime24", "amc"], data=DataConfig(path="x.jsonl"))
    assert EvaluationConfig(benchmarks=["amc"], every=5).data == DataConfig()
