"""The examples of docs/cache_control.md print what is said beside them."""

import re
from pathlib import Path

import pytest

DOC = Path(__file__).parent.parent / "docs" / "cache_control.md"


def test_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", DOC.read_text(), flags=re.DOTALL))
    exec(code, {})
    expected = re.findall(r"^print\(.*\)  # (.*)$", code, flags=re.MULTILINE)
    assert len(expected) == code.count("print(") > 5
    assert capsys.readouterr().out.splitlines() == expected
