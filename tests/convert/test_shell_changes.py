"""Ways to set a variable of a shell script: `rlplus convert` reads the value that bash has, or takes it for unknown."""

import random
from pathlib import Path

import processes
import pytest
from bash_scripts import BASH, VERL, runs

from rlplus.tools.convert.shell_script import HARMLESS, OWN, SETTING, UNSEEN, read_shell

pytestmark = pytest.mark.skipif(BASH is None, reason="bash is not installed")

# Statements behind X=1 and A=(a.e=1 a.f=2), which set one of the two without a plain assignment.
CHANGES = [
    "IFS=, read -r X <<< 7", "Y=X\ncommand read $Y <<< 7", "Y='X=3'\ne'v'al $Y",
    "FOO=1 eval 'X=3'", "command read X <<< 7", "builtin read X <<< 7", "read -rX <<< 7",
    "builtin export X=3", "command -p export X=3", "builtin source ./other.sh", "command . ./other.sh",
    "builtin -- eval 'X=3'", "trap 'X=2' DEBUG", "trap 'X=2' DEBUG\nX=1", "exec {X}> f", "exec {X}<> f", "X=1 {X}> f",
    "true {X}<<< a", 'export "X=3"', "export X'=3'", 'export "X=$((1 + 2))"', "Y=X\nexport $Y=3",
    "Y=X\nexport \"$Y=3\"", "Y=X\nprintf -v $Y 3", "printf -vX 3", "printf -v 'X' 3", "declare -i X\nX=2+3",
    "declare -u X\nX=a", "declare -l X\nX=B", "typeset -i X=2+3", "declare -i X\nX+=4", "readonly X=2\nX=3",
    "declare -r X=2\nX=3", "readonly X\nX=3", "declare -n Y=X\nY=3", "Y=X\ndeclare -n Y\nY=3",
    "f() { local -n Y=$1; Y=3; }\nf X", "local X=3", "X=3 export X", "unset -v X\nX=2\nunset X", "Y=X\nunset $Y",
    "let X=5", "let 'X += 5'", "let X++", "((X++))", "(( (X) + (X = 5) ))", "Y=$((X = 5))", "Y=$[X = 5]",
    "Y=$((++X))", "Y=$(( -- X ))", "[[ X=5 -eq 5 ]]", "[[ X++ -eq 1 && 1 == 1 ]]", "Y=abcdef\nZ=${Y:X=2:1}",
    "Z=${A[X=1]}", "A[X=1]=a.g=3", ": <<< $((X = 5))", ": << END\n$((X = 5)) ${Y:=3}\nEND", "true > f$((X += 5))",
    'unset X\n: "${X:=3}"', "unset X\n: ${X=3}", "mapfile X <<< 7", "readarray -t X <<< 7", "getopts ab X -a",
    "while read X; do break; done <<< 7", "for X in 5; do :; done", "for ((X = 4; X < 6; X++)); do :; done",
    "select X in 5; do break; done <<< 1", "f() { X=2; }\nf", "f() { printf -v \"$1\" 3; }\nf X",
    "f() { read $1 <<< 7; }\nf X", "f() { eval \"$1=3\"; }\nf X", "if true; then eval X=3; fi", "X=2 true\nX+=3",
    "X=2 Y=$X\nX=$Y", "export X=2 Y=$X\nX=$Y", "export P=5 Y=$P\nX=${Y:-7}", "declare Y=$X X=4\nX=$Y", "A=a.e=7",
    "A+=x", "A[0]=a.e=7", "A+=([0]=a.e=7)", "A=(\"${A[@]}\" a.g=3)\nA=a.e=7", "declare -a A='(a.e=8)'",
    "read -ra A <<< 'a.e=8 a.f=9'", "set -- 5\nX=${1:-3}", "set a b\nX=${2:-3}", "f() { X=${1:-3}; }\nf 8",
    "source ./other.sh\nX=${X:-3}", "eval LR=5\nX=${LR:-3}", ". ./other.sh\nset_x() { :; }",
    "eval 'f() { X=4; }'\nX=2\nf", "X=${RANDOM:-9}", "X=${SECONDS:-9}", "X=${BASH_VERSION-9}", "X=${UID:-9}",
    "X=${OPTIND-9}", "X=${_-9}", "X=${-:-9}", "X=${#:-9}", "X=${?-9}", "X=${0:-9}", "X=${@:-9}",
    "read <<< 7\nX=$REPLY", "REPLY=2\nread <<< 7\nX=$REPLY", "X=$-", "coproc X { :; }", "wait -p X", "\\read X <<< 7",
    "'read' X <<< 7", "Y=read\n$Y X <<< 7", "shopt -s lastpipe\necho 7 | read X", "echo 7 | (read X)",
    "X=2 && true || X=3", "true || X=3", "! X=4", "time X=4", "alias f='X=3'\nshopt -s expand_aliases\nf",
    "case 1 in 1) X=3 ;; esac", "function f() { X=3; }\nf", "f() ( X=3 )\nf", "f() if true; then X=3; fi\nf",
    "E='X=7'\n(( E )) || :", "F=X\nE=\"$F=7\"\n(( E )) || :", "E='X=7'\nlet Y=E", "E='X=7'\nY=$((E+0))",
    "E='X=7'\nF=E\nY=$((F+0))",
    "E='X=7'\ndeclare -i Q\nQ=E", "E='X++'\n[[ $E -eq 1 ]]", "E='X=7'\nY=${A[E]}", "E='X=7'\nY=$(( $E ))",
    "for E in 'X=7'; do Y=$((E)); done", "set -o posix\nX=3 export Y", "set -euo posix\nX=3 :",
    "POSIXLY_CORRECT=1\nX=3 :", 'wait -p X', ': "${X:=3}" ${Y:=4}\nX=$Y', ": ${Y:=4} ${Y:=5}\nX=$Y",
    "{ X=3; }", "( X=3 )", "X=3 &", "X=\\\n5", "X='5'\"6\"7", "X=5 # X=6",
]  # fmt: skip


def check(text: str, folder: Path) -> int:
    """Compare what is read with what bash passes, if it comes as far; -> how many values are known."""
    script = read_shell(text, folder / "a.sh")
    known = 0
    for flag in "01" if "FLAG" in text else "0":
        last = dict(word.partition("=")[::2] for word in runs(text, flag, folder) if "=" in word)
        for key, value in last.items():
            if key in script.settings:
                known += 1
                read = script.settings[key]
                assert ("" if read is None else str(read)) == value.strip(" \t\n"), (key, text)
            else:
                assert key in script.unread or any("$" in name for name in script.unread), (key, text)
    return known


@pytest.mark.parametrize("change", CHANGES)
def test_another_way_to_set_a_variable_makes_it_unknown(change: str, tmp_path: Path) -> None:
    check(f'X=1\nA=(a.e=1 a.f=2)\n{change}\n{VERL} a.b=$X a.c=${{X:-4}} a.d="$X" "${{A[@]}}" $A', tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        "",
        "echo X=2",
        "[ $X = 2 ]",
        "[[ $X = 2 ]]",
        "mkdir X",
        "export X",
        "set -x",
        ": & P=$!\nwait $P",
        "wait",
        "wait -n",
        'for node in "$X"; do :; done',
    ],
)
def test_what_sets_no_variable_leaves_it_known(change: str, tmp_path: Path) -> None:
    assert check(f"X=1\n{change}\n{VERL} a.b=$X a.c=$((X + 1)) a.d=${{Y:-3}}", tmp_path) == 3


SUMS = [
    "16#ff", "1_0", "0o17", "0b11", "0x1F", "010", "08", "1e3", "1.5", "-2**2", "2**-1", "2**3**2", "-7/2", "-7%3",
    "7%-3", "1//2", "1<2", "1==1", "1,2", "5&3", "5|3", "~1", "!0", "!X", "++X", "X++", "--X", "- -X", "-(-X)", "+X",
    "1+-X", "X=5", "X?2:3", "10-2-3", "2*(3+4)*5", "100/7*7", "2**62*2", "9223372036854775807+1", "X*X-Y/2", "Y%X",
    "not(X)", "X[0]", "'X'", "(X", "Z+1", "2*", "7/0", "True", "None", "X_1",
    "1X", "2 ** 3", "X * (Y - 1)", "- 2 ** 2", "2 * * 3",
]  # fmt: skip


@pytest.mark.parametrize("form", ["$(({}))", "$[{}]", '"$(( {} + 0 ))"'])
def test_sums_are_bashs_or_unknown(form: str, tmp_path: Path) -> None:
    known = 0
    for terms in SUMS:
        if not form.format(terms).count("(") - form.format(terms).count(")"):
            known += check(f"X=3\nY=-8\nexport S={form.format(terms)} 2> /dev/null\n{VERL} a.b=$S", tmp_path)
    assert known >= 9 * ("$[" not in form)


@pytest.mark.parametrize(
    "words",
    [
        "$E", '"$E"', "${E}x", 'x"$E"', "a.x=$E$E", "$E$E", '"$E"$E', "a.b=1 $E", "${A[@]}", '"${A[@]}"', "${A[*]}",
        '"${A[*]}"', "$A", '"$A"', "${A[0]}", "${A[1]}", 'x"${A[@]}"', '"x${A[@]}y"', "x${A[@]}y", '"${A[@]}${A[@]}"',
        '"${N[@]}"', "${N[@]}", 'a.x="${N[@]}"', "${E[1]}", "${E[0]}", "${E[@]}", "${NO:-a.x=1 a.y=2}",
        '"${NO:-a.x=1 a.y=2}"', "${NO:-\"a.x=1 2\" $E}", "a.x=${NO:-$E}", '"${F[@]}"', "${F[@]}", '"$E$N"', "${T}",
        "a.x=$T", "$W", '"$W"', "${B[@]}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("blanks", ["", "IFS=,\n"])
def test_words_are_split_as_bash_splits_them(words: str, blanks: str, tmp_path: Path) -> None:
    text = (
        f"{blanks}E=' a.p=1  a.q=2 '\nA=(a.b=1 'a.c=2 3' '' a.d=,4)\nN=()\nF=('')\nT=$'a.t=1\t'\nW='a.w=1\x0c a.v=2'\n"
    )
    check(f'{text}B=("${{A[@]}}" $E a.b=5)\n{VERL} a.z=0 {words} a.y=9', tmp_path)


def script(draw: random.Random) -> str:
    """A random script of assignments and other ways to set variables."""
    names, arrays = "XYZ", "PQ"

    def value(depth: int = 0) -> str:
        name, array = draw.choice(names), draw.choice(arrays)
        inner = value(depth + 1) if depth < 2 else "3"
        return draw.choice([
            str(draw.randrange(20)), f"${name}", f'"${name}"', f"'${name}'", f"${{{name}:-{inner}}}",
            f"${{{name}-{inner}}}", f"$(({name} {draw.choice('+-*/%')} {draw.randrange(1, 5)}))", '"a b"', "a\\ b",
            f"${{{array}[0]}}", "$(echo 5)",
        ])  # fmt: skip

    def word() -> str:
        return draw.choice(
            [f"k.{draw.choice('abcdef')}={value()}"] * 3
            + [f'"${{{draw.choice(arrays)}[@]}}"', f"${draw.choice(names)}"]
        )

    def statement(depth: int = 0) -> str:
        name, array, text = draw.choice(names), draw.choice(arrays), value()
        words = " ".join(word() for _ in range(draw.randrange(4)))
        body = "; ".join(statement(depth + 1) for _ in range(draw.randrange(1, 3))) if depth < 2 else ":"
        plain = [
            f"{name}={text}",
            f"{name}+={text}",
            f"{array}=({words})",
            f"{array}+=({words})",
            f"export {name}={text}",
        ]
        others = [
            f"{name}={text} true", f"(({name} = 1 + {draw.randrange(5)}))",
            f"if [ $FLAG = 1 ]; then {body}; else {body}; fi", f"for {name} in 1 2; do {body}; done",
            f"f() {{ {body}; }}", "f" if depth == 0 else ":", f"({body})", f"[ $FLAG = 1 ] && {name}=4",
            f"unset {name}", f"{{ {body}; }}", f"{name}={text} | true", f"IFS=, read -r {name} <<< 5",
            f"builtin export {name}=6", f'eval "{name}=7"', f'export "{name}=8"', f"declare -i {name}",
            f"{array}={text}", f"export {name}=1 {draw.choice(names)}=${name}", f": ${{{name}:=3}}",
            f"printf -v {name} 6", f"let {name}=2", f"set -- {text}; {name}=${{1:-4}}", f"readonly Z={text}",
        ]  # fmt: skip
        return draw.choice(plain if draw.random() < 0.6 else others)

    before = "\n".join(statement() for _ in range(draw.randrange(1, 8)))
    return f"f() {{ :; }}\n{before}\n{VERL} k.g=0 " + " ".join(word() for _ in range(draw.randrange(1, 5)))


@pytest.mark.parametrize("seed", range(4))
def test_random_scripts_are_read_as_bash_runs_them(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    assert sum(check(script(draw), tmp_path) for _ in range(40)) > 50


def test_each_builtin_of_bash_is_known_to_set_variables_or_not() -> None:
    assert BASH
    builtins = processes.run([BASH, "-c", "compgen -b"]).stdout.split()
    assert {*builtins} <= HARMLESS | SETTING | UNSEEN | {"builtin", "command", "exec"}
    assert not HARMLESS & (SETTING | UNSEEN)


def test_the_variables_of_bash_itself_are_unknown() -> None:
    assert BASH
    names = processes.run([BASH, "-c", "compgen -v"], env={}).stdout.split()
    assert "RANDOM" in names
    assert [name for name in names if not OWN.fullmatch(name) and not name.startswith("RLPLUS")] == []
