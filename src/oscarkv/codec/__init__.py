"""The packed format: where the bits are, and how a row of numbers becomes codes.

`docs/format.md` is the definition; this folder is its reference implementation, and every
kernel is tested against it. Imports nothing of oscarkv but `recipe` and `errors`.
"""

from oscarkv.codec.encode import RowCodec
from oscarkv.codec.layout import PageLayout, RowLayout

__all__ = ["PageLayout", "RowCodec", "RowLayout"]
