"""The hooks of the tests."""

from tests.conftest import *  # noqa: F403
