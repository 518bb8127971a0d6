"""Transformers: load, calibrate, attach, and `OscarCache` for `generate()`."""

try:
    import transformers  # noqa: F401
except ImportError:
    from oscarkv.errors import MissingDependencyError

    raise MissingDependencyError(
        'this needs Transformers: pip install "oscarkv[transformers]"'
    ) from None
