"""Every error that Kvant raises on purpose, as one small tree.

    KvantError
    ├── ConfigError             an option, or a combination of options, that cannot be honoured
    │   └── CapacityError       memory or disk does not suffice for what was asked
    ├── RequestError            one request is wrong; everything else goes on
    │   ├── ContextLengthError  prompt, or prompt + max_tokens, is longer than the context
    │   └── TemplateError       the chat template refuses the conversation, or is itself unsafe
    ├── ModelError              a model cannot be found, read or run
    │   ├── ModelNotFoundError  no such alias, file, directory
    │   ├── DownloadError       the network or the package index failed; nothing half-done is kept
    │   ├── CheckpointError     a file is malformed, truncated, or does not hold what the model needs
    │   └── UnsupportedError    an architecture, tensor type, tokenizer or rope type that is not built here
    └── GenerationError         a request failed while it ran (non-finite logits, for example)

A message names the thing that is wrong and the remedy, in one line. `ConfigError` and `RequestError` are also
`ValueError`, so that callers who know only the standard library catch them too. `code` and `param` are what an HTTP
error object carries.
"""


class KvantError(Exception):
    """The root of everything Kvant raises on purpose."""

    code: str = "kvant_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class ConfigError(KvantError, ValueError):
    """An option, or a combination of options, that cannot be honoured."""

    code = "invalid_option"


class CapacityError(ConfigError):
    """Memory or disk does not suffice for what was asked."""

    code = "insufficient_capacity"


class RequestError(KvantError, ValueError):
    """One request is wrong; everything else goes on."""

    code = "invalid_request"


class ContextLengthError(RequestError):
    """The prompt, or the prompt and the tokens asked for, are longer than the context."""

    code = "context_length_exceeded"


class TemplateError(RequestError):
    """The chat template refuses the conversation, or is itself unsafe."""

    code = "invalid_messages"


class ModelError(KvantError):
    """A model cannot be found, read or run."""

    code = "model_error"


class ModelNotFoundError(ModelError):
    """No such alias, file or directory."""

    code = "model_not_found"


class DownloadError(ModelError):
    """The network or the package index failed; nothing half-done is kept."""

    code = "download_failed"


class CheckpointError(ModelError):
    """A model file is malformed, truncated, or does not hold what the model needs."""

    code = "malformed_checkpoint"


class UnsupportedError(ModelError):
    """An architecture, tensor type, tokenizer or rope type that is not built here."""

    code = "unsupported"


class GenerationError(KvantError):
    """A request failed while it ran."""

    code = "generation_failed"
