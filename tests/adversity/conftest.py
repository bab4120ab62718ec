"""The real model, for the tests in this folder that ask for it."""

from tests.api.real import encode, real_engine, real_model

__all__ = ["encode", "real_engine", "real_model"]
