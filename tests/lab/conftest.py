from tests.support.unrendered import rendered, unrendered

__all__ = ["rendered", "unrendered"]
