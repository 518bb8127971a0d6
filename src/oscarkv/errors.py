"""Errors a user can act on.

Every message says what was wrong, where (file, layer, knob), and what to do about it.
The command line prints them as one line and exits with 2; anything else is a bug and keeps
its traceback.
"""


class OscarError(Exception):
    """Base of every error oscarkv raises on purpose."""


class RecipeError(OscarError):
    """An unknown, invalid or contradictory recipe knob."""


class ArtifactError(OscarError):
    """An artifact file that cannot be read, is damaged, or has the wrong format."""


class ModelMismatchError(OscarError):
    """An artifact used with a model it was not calibrated for."""


class UnsupportedModelError(OscarError):
    """A model, or a layer of it, that oscarkv cannot quantise."""


class CalibrationError(OscarError):
    """Calibration data that cannot give usable statistics."""


class CacheError(OscarError):
    """Wrong use of a cache: no pages left, sequence too long, bad shapes."""


class MissingDependencyError(OscarError):
    """An optional dependency is not installed; the message names the extra."""
