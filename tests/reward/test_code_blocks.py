"""The code in a response, and outputs that count as the same."""

import json

import pytest

from rlplus.train.reward.graders.code import _same_text, _same_value, extract_code


def test_extract_code() -> None:
    draft_and_script = "a\n```python\ndef f(): pass\n```\nthen\n```python\nprint(1)\n```"
    assert extract_code(draft_and_script) == "print(1)\n"
    assert extract_code(draft_and_script, {"f"}) == "def f(): pass\n"
    assert extract_code(draft_and_script, {"g"}) == "print(1)\n"
    assert extract_code("```py\nclass S:\n  def f(self): pass\n```\n```py\ndef g(): f()\n```", {"f"}).startswith(
        "class"
    )
    assert extract_code("```python\nx = 1\n```\n```\ny\n```") == "x = 1\n"
    assert extract_code("```\nx\n```\n```py\ny\n```") == "y\n"
    assert extract_code("```\nx\n```") == "x\n"
    assert extract_code("```python3\nx\n```\nThen:\n```\ny\n```") == "x\n"
    assert extract_code("```Python title=a\nx\n```") == "x\n"
    assert extract_code("```bash\npip\n```\nprose\n```\nx\n```") == "x\n", "want no text between two blocks"
    assert extract_code("```cpp\nint x;\n```") is None
    assert extract_code("no block") is None


@pytest.mark.parametrize(
    ("output", "wanted", "values", "same"),
    [
        ("1 2\n", "1 2", False, True),
        ("1 2 \n\n", "1 2", False, True),
        ("1.0", "1", False, True),
        ("1\n2", "1 2", False, False),
        ("1 2 3", "1 2", False, False),
        ("yes", "Yes", False, False),
        ("[1, 2]", "[1,2]", True, True),
        ("1.0", "1", True, True),
        ('"1"', "1", True, False),
        ("noise", "1", True, False),
    ],
)
def test_same_output(output: str, wanted: str, values: bool, same: bool) -> None:
    found = _same_value(output, json.loads(wanted)) if values else _same_text(output, wanted)
    assert found is same
