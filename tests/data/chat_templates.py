"""Chat templates of the shapes in use, and conversations for them."""

CHATML = """{%- for message in messages %}
    {%- if loop.first and messages[0]['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
BRACKETS = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}"
    "{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
    "{% for message in loop_messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}"
    "{% endif %}{% endfor %}"
)
HEADERS = """{{- bos_token }}
{%- set ns = namespace(seen=false, count=0) %}
{%- macro header(role) -%}
<|start_header_id|>{{ role }}<|end_header_id|>

{% endmacro %}
{%- for message in messages if message.content is string %}
    {%- set ns.count = ns.count + 1 %}
    {%- if message.role == 'system' %}{% set ns.seen = true %}{% endif %}
    {{- header(message.role) }}{{ message.content | trim }}<|eot_id|>
{%- endfor %}
{%- if not ns.seen %}{{ '<!-- ' ~ ns.count ~ ' -->' }}{% endif %}
{%- if add_generation_prompt %}{{ header('assistant') }}{% endif %}
"""
TOOLS = """{%- if tools %}
    {{- "# Tools\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
        {{- "\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- generation %}{{ message.role | upper }}: {{ message.content
        | replace("\\n", " ") | tojson }}{% endgeneration %}

    {%- if loop.index > 3 %}{% break %}{% endif %}
{%- endfor %}
"""
TEMPLATES = {"chatml": CHATML, "brackets": BRACKETS, "headers": HEADERS, "tools": TOOLS}
CONVERSATIONS = [
    [{"role": "user", "content": "  Hello, \u6f22\u5b57 \U0001f600 <b>&amp;</b>\n"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1 = ?"},
        {"role": "assistant", "content": " 2 "},
        {"role": "user", "content": "{{ messages }} {% raw %} 'quotes' \"too\" \\n"},
    ],
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {"type": "function", "function": {"name": "add", "description": "caf\u00e9"}}
