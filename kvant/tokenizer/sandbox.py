"""Where chat templates run: jinja2's immutable sandbox, with a budget and with knowledge of who wrote which character.

A template is compiled once (`compile_template`) and executed in an environment of its own for every rendering
(`Sandbox`), so renderings share nothing and need no locks. Three things are added to jinja2, all in the generated code:

    literals         become TemplateText (environment.literal), so the output knows its author        template_text.py
    what takes time  ticks: loops, calls, comparisons, slices, prints; constant folding is off,
                     since it would run the template's arithmetic at compile time                     template_budget.py
    what may be called  is a list: macros, loops, and the functions and methods of               template_functions.py

Refused before anything runs: names that start with an underscore (Python's internals) and access to other files.
"""

import types
from collections.abc import Callable, Iterable
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvant.tokenizer import template_text as tt
from kvant.tokenizer.template_budget import MAX_SOURCE, Budget
from kvant.tokenizer.template_functions import CONTAINER_METHODS, LOOKING_METHODS, Functions

MAX_INTEGER_BITS = 4096


class Compiler(CodeGenerator):
    """jinja2's code generator with literals marked and everything that takes time metered."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, str):
            self.write(f"environment.literal({node.value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_EnvironmentAttribute(self, node: nodes.EnvironmentAttribute, frame: Frame) -> None:
        self.write(f"environment.{node.name}()")  # only `tick`, put in by `_generate`

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        self.writeline("environment.tick()", node)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        self.write("(environment.operand(")
        self.visit(node.expr, frame)
        self.write(")")
        for operand in node.ops:
            self.visit(operand, frame)
        self.write(")")

    def visit_Operand(self, node: nodes.Operand, frame: Frame) -> None:
        symbols = {"eq": "==", "ne": "!=", "gt": ">", "gteq": ">=", "lt": "<", "lteq": "<=", "in": "in", "notin": "not in"}
        self.write(f" {symbols[node.op]} environment.operand(")
        self.visit(node.expr, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.slice(")
        self.visit(node.node, frame)
        for bound in (node.arg.start, node.arg.stop, node.arg.step):
            self.write(", ")
            if bound is None:
                self.write("None")
            else:
                self.visit(bound, frame)
        self.write(")")

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return node.data

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return f"environment.literal({''.join(group)!r})"

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("environment.text(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(")")


class Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model wrote, for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    """The world of one rendering. What templates can reach are the tables of `Functions`; the rest is refused."""

    code_generator_class = Compiler
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})
    literal = staticmethod(tt.literal)
    concat: Callable[[Iterable[Any]], str]

    def __init__(self, budget: Budget):
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            cache_size=0,
            extensions=[Generation, LoopControlExtension],
        )
        functions = Functions(budget)
        self._functions, self._budget = functions, budget
        self._callables = frozenset(functions.functions.values())
        tables: Any = self  # jinja2 infers narrower types for its tables than it accepts
        tables.filters, tables.tests, tables.globals = functions.filters, functions.tests, functions.functions
        self.tick, self.text, self.concat = budget.tick, functions.text, functions.concat

    # --- compile time ----------------------------------------------------------------------------------------------------

    def _generate(self, source: nodes.Template, name: Any, filename: Any, defer_init: bool = False) -> str:
        for attribute in source.find_all(nodes.Getattr):
            _refuse_private(attribute.attr)
        for reference in source.find_all(nodes.NSRef):
            _refuse_private(reference.attr)
        for item in source.find_all(nodes.Getitem):
            if isinstance(item.arg, nodes.Const) and isinstance(item.arg.value, str):
                _refuse_private(item.arg.value)
        for _ in source.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
            raise SecurityError("it loads another file")
        for _ in source.find_all(nodes.ScopedEvalContextModifier):
            raise SecurityError("it switches HTML escaping on or off")
        for loop in source.find_all(nodes.For):
            loop.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("tick"), lineno=loop.lineno))
        return super()._generate(source, name, filename, defer_init)

    # --- run time --------------------------------------------------------------------------------------------------------

    def operand(self, value: Any) -> Any:
        """One side of a comparison."""
        self.tick()
        if isinstance(value, (list, tuple, dict)):
            self._budget.spend_container(value)
        return value

    def slice(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        self.tick()
        part = value[slice(start, stop, step)]
        if isinstance(part, str):
            self._budget.spend_text(len(part))
        elif isinstance(part, (list, tuple)):
            self._budget.spend_elements(len(part))
        return part

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            self._budget.spend_container(argument)  # it will be hashed
        return super().getitem(obj, argument)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"it reaches for the attribute {attribute!r} of a {type(obj).__name__}")

    def wrap_str_format(self, value: Any) -> None:
        return None  # str.format is answered by `call`, like every method of str

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.tick()
        if isinstance(__obj, (Macro, LoopContext, Undefined)):
            return __context.call(__obj, *args, **kwargs)
        kwargs.pop("_loop_vars", None)
        kwargs.pop("_block_vars", None)
        if isinstance(__obj, (types.BuiltinMethodType, types.MethodType)):
            return __self._call_method(__obj, args, kwargs)
        if isinstance(__obj, types.FunctionType | type) and __obj in __self._callables:
            return __obj(*args, **kwargs)
        raise SecurityError(f"it calls an object of type {type(__obj).__name__}")

    def _call_method(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner, name = method.__self__, method.__name__
        if method in self._callables:
            return method(*args, **kwargs)
        if isinstance(owner, str) and name in self._functions.methods:
            return self._functions.methods[name](owner, *args, **kwargs)
        allowed = (
            (isinstance(owner, str) and name in LOOKING_METHODS)
            or (isinstance(owner, LoopContext) and name in ("cycle", "changed"))
            or name in CONTAINER_METHODS.get(type(owner), frozenset())
        )
        if not allowed:
            raise SecurityError(f"it calls the method {name!r} of a {type(owner).__name__}")
        self._budget.spend_container((args, kwargs))
        if isinstance(owner, str) and args and isinstance(args[0], str):
            self._budget.spend_search(owner, args[0])
        return method(*args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.tick()
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            return self._functions.concat((left, right))
        if operator == "%" and isinstance(left, str):
            return self._functions.format_percent(left, right)
        if operator == "*" and (isinstance(left, str) or isinstance(right, str)):
            text, times = (left, right) if isinstance(left, str) else (right, left)
            return self._functions.repeat(text, times)
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _refuse_large(left.bit_length() * abs(right))
        if operator == "+" and isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
            self._budget.spend_elements(len(left) + len(right))
        if operator == "*" and (isinstance(left, (list, tuple)) or isinstance(right, (list, tuple))):
            elements, times = (left, right) if isinstance(left, (list, tuple)) else (right, left)
            self._budget.spend_elements(len(elements) * max(times, 0))
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int):
            _refuse_large(result.bit_length())
        return result


def compile_template(source: str) -> types.CodeType:
    """Python byte code of a template. Raises jinja2's TemplateSyntaxError or SecurityError; runs nothing of it."""
    if len(source) > MAX_SOURCE:
        raise SecurityError(f"it is longer than {MAX_SOURCE} characters")
    return Sandbox(Budget()).compile(source)


def execute_template(code: types.CodeType, variables: dict[str, Any]) -> str:
    """Run compiled code once. The result knows which characters the template wrote (`template_text.content_spans`)."""
    environment = Sandbox(Budget())
    template = environment.template_class.from_code(environment, code, environment.globals)
    return environment.concat(template.root_render_func(template.new_context(variables)))


def _refuse_private(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"it reaches for the attribute {name!r}")


def _refuse_large(bits: int) -> None:
    if bits > MAX_INTEGER_BITS:
        raise SecurityError(f"it computes an integer of more than {MAX_INTEGER_BITS} bits")
