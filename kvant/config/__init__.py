"""The words of configuration: frozen dataclasses, one declaration per option, nothing that changes after start-up."""
