"""The values that `rlplus convert` reads of shell scripts, beside the ones that bash passes to verl.

A value that is read is the value in every run, and each key that a run passes is in the result.
"""

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from bash_scripts import BASH, VERL, passed

from rlplus.tools.convert import convert
from rlplus.tools.convert.shell_script import read_shell
from rlplus.tools.convert.verl_overrides import DEFAULTS
from rlplus.train.config.synonyms import VERL as NAMES
from rlplus.train.config.synonyms import WITHOUT

R = "actor_rollout_ref.rollout."
FOLDER = Path(__file__).parent / "scripts"

# Scripts, with the values that must be read, and the keys that must not; every other key may be either.
SCRIPTS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "order": (f"X=1\nX=2\n{VERL} a.b=$X", {"a.b": 2}, set()),
    "environment": (f"PYTHONUNBUFFERED=1 X=3 {VERL} a.b=1 a.c='two words'", {"a.b": 1, "a.c": "two words"}, set()),
    "branches": (f'if [ "$FLAG" = 1 ]; then X=1; else X=2; fi\n{VERL} a.b=$X a.c=3', {"a.c": 3}, {"a.b"}),
    "one branch": (f"X=1\nif [ $FLAG = 1 ]\nthen\n  X=2\nfi\n{VERL} a.b=$X a.c=${{X}}x", {}, {"a.b", "a.c"}),
    "and": (f"X=1\n[ $FLAG = 1 ] && X=2\n{VERL} a.b=$X", {}, {"a.b"}),
    "case": (f"X=1\ncase $FLAG in\n  0|2) X=2 ;;\n  (*) Y=1 ;;\nesac\n{VERL} a.b=$X", {}, {"a.b"}),
    "in a loop": (f"X=1\nfor i in 1; do\n{VERL} a.b=$X a.c=4\nX=2\ndone", {"a.c": 4}, {"a.b"}),
    "in a function": (f"f() {{\n {VERL} a.b=$X a.c=${{Y:-5}} a.d=1\n}}\nX=1\nY=2\nX=2\nf", {"a.d": 1}, {"a.b", "a.c"}),
    "source": (f"X=1\nA=(a.b=1)\nsource other.sh\n{VERL} a.c=$X \"${{A[@]}}\"", {}, {"a.b", "a.c"}),
    "home": (f"source other.sh\n{VERL} a.b=$HOME/x", {"a.b": "~/x"}, set()),
    "declare": (
        f"declare -i X=2+3\nexport Y=4 Z\nreadonly V=6\n{VERL} a.b=$X a.c=$Y a.d=$V",
        {"a.c": 4}, {"a.b", "a.d"},
    ),
    "declared array": (f"declare -ra A=(a.b=1 a.c=2)\n{VERL} \"${{A[@]}}\"", {}, {"a.b", "a.c"}),
    "added": (f"X=1\nX+=5\n{VERL} a.b=$X", {"a.b": 15}, set()),
    "array": (f"A=(a.b=1)\nA+=(a.c=2 a.d='x y')\n{VERL} \"${{A[@]}}\"", {"a.b": 1, "a.c": 2, "a.d": "x y"}, set()),
    "array added in a branch": (
        f"A=(a.b=1 a.c=2)\nif [ $FLAG = 1 ]; then A+=(a.c=3 a.d=4); fi\n{VERL} \"${{A[@]}}\" a.e=5",
        {"a.b": 1, "a.e": 5}, {"a.c", "a.d"},
    ),
    "array added by a function": (
        f"add() {{ A+=(a.d=4); }}\nA=(a.b=1)\nadd\n{VERL} \"${{A[@]}}\"", {"a.b": 1}, {"a.d"},
    ),
    "array replaced in a branch": (
        f"A=(a.b=1)\nif [ $FLAG = 1 ]; then A=(a.c=3); fi\n{VERL} \"${{A[@]}}\"", {}, {"a.b", "a.c"},
    ),
    "element": (f"A=(1 2 3)\n{VERL} a.b=${{A[1]}} a.c=$A a.d=${{A[7]}}", {}, {"a.b", "a.c", "a.d"}),
    "text of texts in a branch": (
        f'M="a.f=1\n a.g=2"\nE="a.b=1"\nif [ $FLAG = 1 ]; then E="$E $M"; else E="a.h=$FLAG"; fi\n{VERL} $E',
        {}, {"a.b", "a.f", "a.g", "a.h"},
    ),
    "split": (f'E="a.b=1 a.c=2"\n{VERL} $E a.d="$E"', {"a.b": 1, "a.c": 2, "a.d": "a.b=1 a.c=2"}, set()),
    "split in the middle": (f'E="1 a.c=2"\n{VERL} a.b=$E', {}, {"a.b", "a.c"}),
    "lines": (f"E='a.b=1 \\\n a.c=2'\nF=\"x\ny\"\n{VERL} a.d=\"$F\" $E", {"a.b": 1, "a.c": 2}, set()),
    "single quotes": (f"X=1\n{VERL} a.b='$X' a.c=\"'$X'\"", {"a.b": "$X", "a.c": "1"}, set()),
    "escapes": (f'{VERL} a.b=\\$X a.c="\\$X" a.d=x\\ y', {"a.b": "$X", "a.c": "$X", "a.d": "x y"}, set()),
    "interpolation": (f"{VERL} a.b='${{a.c}}' a.c=1 a.d=\\${{a.c}}", {"a.c": 1}, {"a.b", "a.d"}),
    "defaults": (
        f"{VERL} a.b=${{NONE:-5}} a.c=\"${{NONE:-\"x ${{Y:-z}}\"}}\" a.d=${{NONE-~/p}}",
        {"a.b": 5, "a.c": "x z"}, set(),
    ),
    "default of an empty one": (f"X=\n{VERL} a.b=${{X:-5}} a.c=${{X-5}}", {"a.b": 5, "a.c": None}, set()),
    "other expansions": (
        f"X=a.b.c\nA=(1 2)\n{VERL} a.b=${{X,,}} a.c=${{X//./_}} a.d=${{X%.c}} a.e=${{#A[@]}} a.f=${{X:+1}}"
        " a.g=${X:0:1}",
        {}, {"a.b", "a.c", "a.d", "a.e", "a.f", "a.g"},
    ),
    "run": (f"X=$(echo 5)\nY=`echo 6`\n{VERL} a.b=$X a.c=$Y a.d=$(echo '7)') a.e=1", {"a.e": 1}, {"a.b", "a.c", "a.d"}),
    "sums": (
        f"N=3\nM=-7\n{VERL} a.b=$((2 ** 11)) a.c=$((N * (N + 1))) a.d=$((M / 2)) a.e=$((M % 2)) a.f=$((10 - 2 - 3))"
        " a.g=$(( $N * 2 + ${N} )) a.h=$((2 ** 3 ** 2)) a.i=$((100/7*7))",
        {"a.b": 2048, "a.c": 12, "a.f": 5, "a.g": 9, "a.h": 512, "a.i": 98}, {"a.d", "a.e"},
    ),
    "sums that Python computes otherwise": (
        f"{VERL} a.b=$((-2 ** 2)) a.c=$((010 + 1)) a.d=$((1 < 2)) a.e=$((5 & 3 == 3))"
        " a.f=$((2 > 1 ? 7 : 8)) a.g=$((~1))",
        {}, {"a.b", "a.c", "a.d", "a.e", "a.f", "a.g"},
    ),
    "sums without a value": (f"{VERL} a.b=$((NONE * 2)) a.c=$((2 ** 62 * 4))", {}, {"a.b", "a.c"}),
    "braces": (f"{VERL} a.b={{1,2}} a.c={{x}}", {"a.c": {"x": None}}, {"a.b"}),
    "comments": (f"X=1 # X=2\n# X=3\n{VERL} a.b=$X#4 a.c=2 # a.d=3", {"a.b": "1#4", "a.c": 2}, set()),
    "redirections": (f"{VERL} a.b=1 2>&1 2> /dev/null a.c=2 < /dev/null 3>> /dev/null", {"a.b": 1, "a.c": 2}, set()),
    "here-documents": (
        f"cat > /dev/null <<'END' <<-E2\nX=2\n{VERL} a.b=1\nEND\n\tit's\n\tE2\nX=1\n{VERL} a.b=$X",
        {"a.b": 1}, set(),
    ),
    "several commands in a line": (f"X=1; Y=2; {VERL} a.b=$X a.c=$Y; X=3", {"a.b": 1, "a.c": 2}, set()),
    "behind and": (f"true && {VERL} a.b=1", {"a.b": 1}, set()),
    "arguments": (f'set -- a.c=7\n{VERL} a.b=1 "$@" ${{@:1}} $1', {"a.b": 1}, set()),
    "signs": (f"{VERL} +a.b=1 ++a.c=2 ~a.d a/b@c=x e=5", {"a.b": 1, "a.c": 2, "a/b@c": "x", "e": 5}, {"~a.d"}),
    "twice": (f"X=$FLAG\n{VERL} a.b=$X a.b=2 a.c=1 a.c=$X", {"a.b": 2}, {"a.c"}),
    "numbers": (
        f"{VERL} a.b=1e-6 a.c=010 a.d=1:30 a.e=2024-01-02 a.f=yes a.g=[1,x] a.h='!!int x' a.i=null a.j=1e3 a.k=true",
        {"a.b": 1e-6, "a.c": "010", "a.d": "1:30", "a.e": "2024-01-02", "a.f": "yes", "a.g": [1, "x"], "a.h": "!!int x",
         "a.i": None, "a.j": 1000.0, "a.k": True}, set(),
    ),
    "dictionary": (f"{VERL} a.b='{{c: 1, d:e}}'", {"a.b.c": 1, "a.b.d": "e"}, set()),
    "carriage returns": (f"X=1\r\n{VERL} a.b=$X \\\r\n  a.c=2\r\n".replace("\r", ""), {"a.b": 1, "a.c": 2}, set()),
}  # fmt: skip


@pytest.mark.skipif(BASH is None, reason="bash is not installed")
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.sh")), ids=lambda path: path.stem)
def test_each_setting_of_the_scripts_is_in_the_result(path: Path, tmp_path: Path) -> None:
    result = convert(path).text
    arguments = passed(path.read_text(), "1", tmp_path)
    assert len(arguments) > 5
    for argument in arguments:
        assert argument.lstrip("+").partition("=")[0] in result


@pytest.mark.skipif(BASH is None, reason="bash is not installed")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_value_that_is_read_is_the_value_of_every_run(name: str, tmp_path: Path) -> None:
    text, known, unknown = SCRIPTS[name]
    (path := tmp_path / "a.sh").write_text(text)
    script, result = read_shell(text, path), convert(path, overrides=["reward.kind=oat"]).text
    flat = {key: value for key, value in known.items() if not isinstance(value, dict)}
    assert {key: script.settings.get(key, "absent") for key in flat} == flat
    assert unknown <= script.unread.keys()
    assert not script.settings.keys() & script.unread.keys()
    for flag in "01":
        last = dict(argument.lstrip("+").partition("=")[::2] for argument in passed(text, flag, tmp_path))
        for key, value in last.items():
            assert key in result or any(f"{word}" in result for word in ("$@", "$1")), (key, result)
            if key in script.settings:
                assert str(script.settings[key]).lower() in (value.lower(), str(json_of(value)).lower()), key


def json_of(value: str) -> Any:
    """The value as JSON, in the form that `str` gives to what YAML reads."""
    try:
        return json.loads(value) if value else None
    except json.JSONDecodeError:
        return {"null": None}.get(value, value.strip("'") if value != "[1,x]" else [1, "x"])


VALUES = {"warmup_style": "cosine", "trust_remote_code": True, "enforce_eager": True}  # the others may be 1


def test_a_setting_that_is_used_or_not_is_in_the_result(tmp_path: Path) -> None:
    heads = {"actor": "actor_rollout_ref.", "rollout": "actor_rollout_ref.", "model": "actor_rollout_ref."}
    heads |= {"optim": "actor_rollout_ref.actor.", "policy_loss": "actor_rollout_ref.actor."}
    names = {f"{heads.get(name.partition('.')[0], '')}{name}" for name in (*NAMES, *WITHOUT["verl"], *DEFAULTS)}
    for estimator, name in itertools.product(("grpo", "gae"), sorted(names)):
        text = name.endswith(("_files", "model.path", "local_dir"))
        value = "text" if text else VALUES.get(name.rpartition(".")[2], DEFAULTS.get(name, 1))
        start = f"{VERL} algorithm.adv_estimator={estimator} actor_rollout_ref.rollout.n=4 x.y=$Z"
        (path := tmp_path / "a.sh").write_text(f"{start} '{name}={json.dumps(value)}'")
        assert f"{name} (line 1" in convert(path).text, name
        path.write_text(f"{start} {name}=$(other)")
        converted = convert(path)
        lines = [*converted.lost, *converted.missing]
        assert any(f"{name} (line 1" in line or line.startswith(f"{name}: line 1") for line in lines), name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f'X=1\nY="a\n{VERL} a.b=1\n', r'a\.sh, line 2: want a " that closes the quote; got none'),
        (f"X=1\n\nY='a\n{VERL} a.b=1\n", r"a\.sh, line 3: want a ' that closes the quote; got none"),
        (f"{VERL} a.b=${{X a.c=1\n", r"a\.sh, line 1: want a } that closes the {; got none"),
        (f"A=(a.b=1\n{VERL} a.c=1;\n", r"a\.sh, line 1: want a \) that closes the array; got none"),
        (
            "ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --x 1",
            r"it is a script of OpenRLHF .*are not converted",
        ),
        (
            "torchrun -m verl.trainer.fsdp_sft_trainer a.b=1",
            "none, but verl.trainer.fsdp_sft_trainer, which is another",
        ),
        ("python -m verl.trainer.main_generation a.b=1", "none, but verl.trainer.main_generation, which is another"),
        (f"bash -c '{VERL} a.b=1'", "one inside of a quoted text, a here-document or a comment"),
        (f"{VERL} a.b=1\n{VERL} a.b=2", "got 2, in lines 1, 2"),
    ],
)
def test_a_script_that_is_not_read_says_why(text: str, message: str, tmp_path: Path) -> None:
    (path := tmp_path / "a.sh").write_text(text)
    with pytest.raises(ValueError, match=message):
        convert(path)


@pytest.mark.parametrize(
    "text",
    [
        f"X=$((1{' + 1' * 20_000}))\n{VERL} a.b=$X", f"X=$(({'- ' * 20_000}1))\n{VERL} a.b=$X",
        f"X=$((1{'0' * 400} / 3))\n{VERL} a.b=$X", f"X=$((1 / 0))\n{VERL} a.b=$X", f"X=$((9 ** 9 ** 9))\n{VERL} a.b=$X",
        f"X={'${Y:-' * 20_000}1{'}' * 20_000}\n{VERL} a.b=$X", f"{VERL} a.b={'[' * 20_000}",
        "\n".join(["A0=x", *(f"A{i + 1}=$A{i}$A{i}" for i in range(60)), f"{VERL} a.b=$A60"]),
        "\n".join(["A=(x)", *["A=(${A[@]} ${A[@]})"] * 60, f"{VERL} ${{A[@]}} a.b=1"]),
        f"{VERL} data.train_batch_size=1{'0' * 400}", f"{VERL} actor_rollout_ref.actor.optim.lr=1{'0' * 400}",
        f"{VERL} actor_rollout_ref.actor.entropy_coeff=-1{'0' * 400}", f"{VERL} a.b=1{'0' * 5000}",
        f"if true; then A=\"$B\"; B=\"$A\"; fi\n{VERL} $A a.b=1", f"{VERL} a.b='!!bool x' a.c='&a [*a]'",
        "\\", f"{VERL} a.b=\\",
    ],
    ids=range(17),
)  # fmt: skip
def test_no_script_ends_in_a_traceback(text: str, tmp_path: Path) -> None:
    (path := tmp_path / "a.sh").write_text(text)
    with contextlib.suppress(ValueError):  # any other error would be a traceback
        assert "a.b" in convert(path).text or "data." in text or "actor." in text


def test_what_stands_behind_the_command_is_listed(tmp_path: Path) -> None:
    (path := tmp_path / "a.sh").write_text(f"{VERL} a.b=1 \\\n  # a.c=2 \\\n  a.d.e=3 \\\n  +a.f=4\n")
    lost = convert(path).lost
    assert {"a.d.e (line 3): no part of the command, which ends before that line",
            "a.f (line 4): no part of the command, which ends before that line"} <= {*lost}  # fmt: skip


def test_files_of_settings_are_listed(tmp_path: Path) -> None:
    (path := tmp_path / "a.sh").write_text(f"{VERL} --config-path=config --config-name 'ppo_megatron' -cn $X a.b=1\n")
    lost = convert(path).lost
    for name in ("--config-path", "--config-name", "-cn"):
        assert any(line.startswith(f"{name} (line 1): the settings of that file are not read") for line in lost), name


@pytest.mark.parametrize("given", ["adv_estimator=gae", "use_kl_in_reward=True"])
def test_what_does_not_go_together_is_left_out_and_listed(given: str, tmp_path: Path) -> None:
    name = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"
    base = f"{VERL} algorithm.adv_estimator=grpo data.train_files=x.parquet {name}=4"
    (path := tmp_path / "a.sh").write_text(base)
    assert convert(path).config.train.sequence_parallel == 4
    path.write_text(f"{base} algorithm.{given}")
    converted = convert(path)
    assert converted.config.train.sequence_parallel == 1
    assert any(
        line.startswith(f"{name} (line 1): train.sequence_parallel goes with neither") for line in converted.lost
    )


def test_false_turns_off_what_a_number_counts(tmp_path: Path) -> None:
    base = f"{VERL} algorithm.adv_estimator=grpo data.val_files=x.parquet {R}tensor_model_parallel_size=1"
    (path := tmp_path / "a.sh").write_text(f"{base} trainer.test_freq=False trainer.save_freq=False")
    config = convert(path).config
    assert (config.evaluation.every, config.checkpoint.every) == (0, 0)
    path.write_text(f"{base} trainer.test_freq=3 trainer.save_freq=4")
    config = convert(path).config
    assert (config.evaluation.every, config.checkpoint.every) == (3, 4)


def test_fields_of_fields_of_the_models_configuration_keep_their_place(tmp_path: Path) -> None:
    fields = (
        "rope_scaling.type=yarn",
        "rope_scaling.factor=2.0",
        "attn_implementation=sdpa",
        "model_config.rope_theta=5",
    )
    settings = " ".join(f"+actor_rollout_ref.model.override_config.{field}" for field in fields)
    (path := tmp_path / "a.sh").write_text(f"{VERL} algorithm.adv_estimator=grpo {settings}")
    model = convert(path).config.model
    assert model.overrides == {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 5}
    assert model.attention == "sdpa"
