#!/usr/bin/env python3
"""Renders chat templates with Jinja2 itself, in the environment that Hugging Face's apply_chat_template builds.

    pip install jinja2==3.1.6 gguf==0.19.0
    python tools/golden/chat_templates.py [--models DIR]

Reads crates/entrokv/tests/fixtures/chat_templates/*.jinja and writes crates/entrokv/tests/fixtures/chat_templates.json:
every template over every conversation, with what was refused and what failed. With --models, also the templates inside the named model files (NAME.gguf in
DIR), of which only the renders are stored. Nothing is random; no clock is read.
"""

import argparse
import datetime
import json
import pathlib

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

FIXTURES = pathlib.Path(__file__).resolve().parents[2] / "crates/entrokv/tests/fixtures"
MODELS = ["smollm2-135m", "qwen2.5-0.5b", "qwen2.5-1.5b"]
# Templates that do not look at the messages: one render says it all.
FIXED = ["python", "whitespace"]
NOW = datetime.datetime(2026, 3, 7, 9, 5, 2)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


class Refused(Exception):
    pass


class Generation(jinja2.ext.Extension):
    """{% generation %} .. {% endgeneration %}: a call block that returns its body."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def environment():
    def raise_exception(message):
        raise Refused(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    return env


def text(role, content, **fields):
    return {"role": role, "content": content, **fields}


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a place, in °C & <mm>.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer", "enum": [1, 3, 7]}},
            "required": ["place"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "", "parameters": {}}}


def call(name, arguments, number):
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


CONVERSATIONS = {
    "one question": {"messages": [text("user", "What is a page?")]},
    "no prompt for an answer": {
        "messages": [text("user", "Hi"), text("assistant", "  Hello!  ")],
        "add_generation_prompt": False,
    },
    "system and several turns": {
        "messages": [
            text("system", "  You are terse. /no_think "),
            text("user", " One? "),
            text("assistant", "<think>\nhm\n</think>\n\nTwo."),
            text("user", "Three?\n"),
        ]
    },
    "odd text": {
        "messages": [
            text("user", "a < b && c > 'd' \"e\" {{ f }} {% g %}\r\n\t日本 é 😀 \\n"),
            text("assistant", ""),
            text("user", ""),
        ]
    },
    "tools": {
        "messages": [
            text("user", "Weather in Köln?"),
            text("assistant", None, tool_calls=[call("weather", {"place": "Köln", "days": 1}, 1)]),
            text("tool", "4.5", name="weather", tool_call_id="call00001"),
            text("assistant", "It is 4.5."),
            text("user", "And in Rome?"),
        ],
        "tools": [WEATHER, CLOCK],
    },
    "two calls": {
        "messages": [
            text("user", "Both"),
            text("assistant", "Now: ", tool_calls=[call("weather", {}, 1), call("clock", {"zone": None}, 2)]),
            text("tool", '{"t": 1}', tool_call_id="call00001"),
            text("tool", "noon", tool_call_id="call00002"),
        ],
        "tools": [WEATHER],
    },
    "roles do not alternate": {"messages": [text("user", "a"), text("user", "b")]},
    "an unknown role": {"messages": [text("user", "a"), text("stop", "b"), text("user", "c")]},
    "system in the middle": {"messages": [text("user", "a"), text("system", "b"), text("user", "c")]},
    "parts": {
        "messages": [
            text("user", [{"type": "text", "text": "One"}, {"type": "text", "text": "two."}]),
            text("assistant", "Three."),
        ]
    },
    "variables and a clock": {
        "messages": [text("user", "a")],
        "variables": {"enable_thinking": False, "custom_tools": [CLOCK], "unk_token": "<other>"},
        "now": NOW.isoformat(),
    },
}


def in_form(form, messages):
    """Text parts joined by line breaks, or strings as lists of one part: the one thing done before the template."""

    def content(value):
        if value is None:
            return None
        texts = [value] if isinstance(value, str) else [part["text"] for part in value]
        return "\n".join(texts) if form == "text" else [{"type": "text", "text": t} for t in texts]

    return [{**message, "content": content(message["content"])} for message in messages]


def render(source, form, conversation):
    variables = {**TOKENS, "documents": None, **conversation.get("variables", {})}
    variables["messages"] = in_form(form, conversation["messages"])
    variables["tools"] = conversation.get("tools")
    variables["add_generation_prompt"] = conversation.get("add_generation_prompt", True)
    if "now" in conversation:
        now = datetime.datetime.fromisoformat(conversation["now"])
        variables["strftime_now"] = now.strftime
    try:
        return {"text": environment().from_string(source).render(variables)}
    except Refused as error:
        return {"refused": str(error)}
    except (jinja2.TemplateError, TypeError) as error:
        return {"fails": f"{type(error).__name__}: {error}"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=pathlib.Path)
    arguments = parser.parse_args()
    sources = {path.stem: path.read_text() for path in sorted((FIXTURES / "chat_templates").glob("*.jinja"))}
    if arguments.models:
        import gguf

        for name in MODELS:
            reader = gguf.GGUFReader(arguments.models / f"{name}.gguf")
            sources[f"model:{name}"] = reader.fields["tokenizer.chat_template"].contents()
    renders = {
        name: {
            title: render(source, "parts" if name == "parts" else "text", conversation)
            for title, conversation in CONVERSATIONS.items()
            if name not in FIXED or title == "one question"
        }
        for name, source in sources.items()
    }
    fixture = {
        "made_by": f"tools/golden/chat_templates.py, jinja2 {jinja2.__version__}",
        "special_tokens": TOKENS,
        "conversations": CONVERSATIONS,
        "renders": renders,
    }
    path = FIXTURES / "chat_templates.json"
    path.write_text(json.dumps(fixture, ensure_ascii=False, indent=1) + "\n")
    num_renders = sum(map(len, renders.values()))
    print(f"{path}: {len(renders)} templates, {num_renders} renders")


if __name__ == "__main__":
    main()
