"""Chat templates in the styles that models come with, written for these tests."""

CHATML_DEFAULT_SYSTEM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# No system role, strict alternation, another name for the assistant; prints BOS.
TURNS = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {{ raise_exception('System role not supported') }}
{%- endif -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- set role = message['role'] -%}
    {%- if role == 'assistant' -%}{%- set role = "model" -%}{%- endif -%}
    {{ '<|im_start|>' + role + '
' + (message['content'] | trim) + '<|im_end|>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<|im_start|>model
'}}
{%- endif -%}
"""

# Headers in variables, tools as indented JSON, macros, a date, default values, content in parts.
TOOLS = """{%- macro header(role) -%}
{{ "<|im_start|>" ~ role ~ "\\n" }}
{%- endmacro -%}
{%- if messages[0].role == "system" -%}
    {%- set system = messages[0].content | trim -%}
    {%- set messages = messages[1:] -%}
{%- else -%}
    {%- set system = "" -%}
{%- endif -%}
{{ header("system") }}
{{- "Today: " + (date_string | default("26 Jul 2024")) + "\\n" }}
{%- if tools is not none and tools %}
    {{- "Tools:\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system + "<|im_end|>" }}
{%- for message in messages %}
    {%- if message.tool_calls is defined and message.tool_calls %}
        {{- header("assistant") }}
        {%- for call in message.tool_calls %}
            {%- set function = call.function %}
            {{- '{"name": "' + function.name + '", "parameters": ' }}
            {{- function.arguments | tojson }}
            {{- "}" }}
        {%- endfor %}
        {{- "<|im_end|>" }}
    {%- elif message.role == "tool" %}
        {{- header("ipython") }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|im_end|>" }}
    {%- else %}
        {{- header(message["role"]) }}
        {%- if message.content is string %}
            {{- message.content | trim }}
        {%- else %}
            {%- for part in message.content if part.type == "text" %}{{ part.text }}{% endfor %}
        {%- endif %}
        {{- "<|im_end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- header("assistant") }}
{%- endif %}
"""

# Reasoning split off by a marker, namespaces, loops backwards, slices, joins, breaks.
THINKING = """{%- set ns = namespace(last=messages|length - 1, seen=false) -%}
{%- for message in messages[::-1] -%}
    {%- if not ns.seen and message.role == "user" -%}
        {%- set ns.seen = true -%}
        {%- set ns.last = messages|length - 1 - loop.index0 -%}
        {%- break -%}
    {%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else '' -%}
    {%- if message.role == "assistant" -%}
        {%- set reasoning = '' -%}
        {%- if '</think>' in content -%}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
        {%- endif -%}
        {%- if loop.index0 > ns.last and reasoning -%}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else -%}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif -%}
        {{- '<|im_end|>\\n' }}
    {%- else -%}
        {{- ['<|im_start|>' ~ message.role, content, '<|im_end|>'] | join('\\n') ~ '\\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false -%}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif -%}
{%- endif -%}
"""

# Markers put together from pieces and by every kind of formatting.
PIECES = (
    "{% generation %}{% set open = '<|im_%s|>' %}{% set names = {'user': 'start', 'assistant': 'start'} %}"
    "{% for message in messages %}{{ open % names[message.role] }}{{ '{}\n{}'.format(message.role, message.content.upper()) }}"
    "{{ '<|' ~ 'IM_END'.lower() ~ '|>' }}{{ 'x<|im_end|>x'[1:-1] }}{{ ('<|im_' ~ 'end|>').replace('end', 'start') }}"
    "{{ ['<|im_', 'end|>']|join }}{% filter trim %} <|im_end|> {% endfilter %}{% set t %}<|im_start|>{% endset %}{{ t * 2 }}"
    "{{ '<|im_%(x)s|>' | format(x='end') }}{{ '<|im_end|>' | string | indent }}{{ ('a<|im_end|>b' | replace('a', '')) }}"
    "{% endfor %}{% endgeneration %}"
)

ALL = {"chatml": CHATML_DEFAULT_SYSTEM, "turns": TURNS, "tools": TOOLS, "thinking": THINKING, "pieces": PIECES}
