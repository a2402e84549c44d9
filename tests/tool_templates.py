"""Chat templates that know tools, each in one of the forms: short ones, made like those of known models."""

from __future__ import annotations

_MESSAGES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}CALL{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
HERMES_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n"
    'Call one as <tool_call>\n{"name": N, "arguments": A}\n</tool_call><|im_end|>\n{% endif %}'
) + _MESSAGES.replace(
    "CALL",
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>',
)
MISTRAL_TEMPLATE = (
    "{% if tools is not none %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
    "{{ raise_exception('ids have nine characters') }}{% endif %}{{ c.function | tojson }}{% endfor %}]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id }} {{ m.content }}"
    "{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
)
LLAMA_TEMPLATE = (
    "{% if tools is not none %}Environment: ipython\n{% for t in tools %}{{ t | tojson }}{% endfor %}"
    'Respond with {"name": N, "parameters": P}\n{% endif %}'
) + _MESSAGES.replace("CALL", '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}')
XML_TEMPLATE = "{% if tools %}{{ tools }}<tool_call><function=f></tool_call>{% endif %}" + _MESSAGES
