"""The hooks of the tests, and their pictures that are not rendered."""

from tests.conftest import *  # noqa: F403
from tests.support.unrendered import rendered, unrendered  # noqa: F401
