"""Chat templates: what they may use, what they are kept from, and malformed conversations."""

import datetime
from typing import Any

import pytest
from small_files import byte_level_core

from radix_jax.text import ChatTemplate, TextError, Tokenizer

USER = [{"role": "user", "content": "hi"}]


def render(source: str, messages: Any = USER, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(messages, **options)


def test_messages_and_the_generation_prompt() -> None:
    source = (
        "{% for message in messages %}<{{ message['role'] }}>{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    talk = [*USER, {"role": "assistant", "content": "ho"}]
    assert render(source, talk) == "<user>hi<assistant>ho<assistant>"
    assert render(source, talk, add_generation_prompt=False) == "<user>hi<assistant>ho"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}x{{ eos_token }}", "<s>x</s>"),
        ("{{ pad_token }}x", "x"),
        ("{% if tools %}tools{% elif documents is none %}none{% endif %}", "none"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "13"),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{{ {'a': 'é<&>', 'b': [1, none]} | tojson }}", '{"a": "é<&>", "b": [1, null]}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% set ns = namespace(n=0) %}{% for x in 'ab' %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{{ messages[0]['content'] | trim | upper }}", "HI"),
        ("{{ messages[1:] | length }}", "0"),
        ("<b>{{ '<' }}", "<b><"),
    ],
)
def test_what_templates_of_the_hub_use(source: str, expected: str) -> None:
    assert render(source) == expected


def test_today() -> None:
    before = datetime.datetime.now().year
    assert before <= int(render("{{ strftime_now('%Y') }}")) <= datetime.datetime.now().year


def test_a_template_that_refuses_gives_its_words() -> None:
    with pytest.raises(TextError, match="cannot render these messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages[0].content.nothing.more }}",
        "{{ 1 + 'a' }}",
        "{{ 1 / 0 }}",
        "{{ range(10**9) | list }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    talk = [dict(USER[0])]
    with pytest.raises(TextError, match="the chat template cannot render these messages"):
        render(source, talk)
    assert talk == USER


def test_a_broken_template_names_its_line() -> None:
    with pytest.raises(TextError, match="not valid Jinja: line 2: "):
        render("a\n{% if %}")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        ("hi", "messages is a str, not a list"),
        (None, "messages is a NoneType"),
        ({"role": "user", "content": "hi"}, "messages is a dict, not a list"),
        ([*USER, "hi"], r"messages\[1\] is a str, not a dict"),
        ([{"content": "hi"}], r"messages\[0\] has no 'role'"),
        ([*USER, {"role": "user"}], r"messages\[1\] has no 'content'"),
        ([{"role": 1, "content": "hi"}], r"messages\[0\]\['role'\] is a int, not a str"),
        ([{"role": "user", "content": None}], r"messages\[0\]\['content'\] is a NoneType, not a str"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\]\['content'\] is a list, not a str"),
    ],
)
def test_malformed_messages_are_told(messages: Any, message: str) -> None:
    with pytest.raises(TextError, match=message):
        render("x", messages)


def test_a_tokenizer_without_a_template() -> None:
    with pytest.raises(TextError, match="no chat template; write the prompt yourself"):
        Tokenizer(byte_level_core()).encode_chat(USER)
