"""The names that users may rely on: exactly these, each documented, each what it says."""

import inspect

import kvant
from kvant import errors

PUBLIC = {
    "LLM",
    "AsyncLLM",
    "SamplingParams",
    "EngineConfig",
    "RequestOutput",
    "CompletionOutput",
    *(name for name, value in vars(errors).items() if inspect.isclass(value)),
}


def test_public_names():
    assert set(kvant.__all__) == PUBLIC
    for name in PUBLIC:
        value = getattr(kvant, name)
        assert value.__name__ == name and value.__doc__, name


def test_every_error_is_a_kvant_error_with_a_code_of_its_own():
    tree = [value for value in vars(errors).values() if inspect.isclass(value)]
    assert all(issubclass(error, errors.KvantError) for error in tree)
    assert len({error.code for error in tree}) == len(tree)
    assert issubclass(errors.RequestError, ValueError) and issubclass(errors.ConfigError, ValueError)
