"""Which tokens of a request are kept exact, in blocks of 16 tokens, or of several times as many; an
engine keeps the blocks."""

from __future__ import annotations

from dataclasses import dataclass

from oscarkv.codec.layout import PAGE_QUANTUM

#: Tokens by which a step may be rolled back (rejected drafts) with its windows still there.
SLACK = 16
#: Tokens at the end of a prompt that another one may replace and still find all before them:
#: one question after a document that the next question is about, too.
TURN = 256


def blocks_for(tokens: int, size: int = PAGE_QUANTUM) -> int:
    return -(-tokens // size)


@dataclass(frozen=True)
class WindowRule:
    """The first `sink` tokens and the last `recent` before any query. Blocks are counted from a
    request's beginning."""

    sink: int
    recent: int
    page: int  # tokens of a history page, where prefix hits end
    #: Pages of 16 tokens in a block. More than one only where no prefix is ever hit.
    pages: int = 1

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.pages * PAGE_QUANTUM

    def blocks(self, tokens: int) -> int:
        return blocks_for(tokens, self.block)

    # -- which blocks --------------------------------------------------------------------------

    @property
    def sink_blocks(self) -> int:
        return self.blocks(self.sink)

    def read_from(self, end: int) -> int:
        """First block, behind the sink, that a query after `end` tokens reads."""
        return max(0, end - self.recent + 1) // self.block

    def tail_start(self, end: int) -> int:
        """First block that must be real once `end` tokens are there, drafts among them."""
        return self.read_from(end - SLACK)

    def hit_before(self, end: int) -> int:
        """The last page boundary that a prompt of `end` tokens can hit: one token is left."""
        return max(0, end - 1) // self.page * self.page

    def before_hit(self, boundary: int) -> range:
        """The blocks, behind the sink, that a hit of `boundary` tokens reads."""
        return range(self.read_from(boundary), boundary // self.block)

    def last_turn(self, prompt: int) -> range:
        """The blocks that hits in the last TURN tokens of a prompt read."""
        first = self.read_from(self.hit_before(prompt - TURN))
        return range(first, self.hit_before(prompt) // self.block)

    # -- how many ------------------------------------------------------------------------------

    @property
    def shared(self) -> int:
        """What a hit reads behind the sink: held to the end where a prompt leaves a prefix that
        it shares with others."""
        return self.blocks(self.recent - 1)  # a hit ends with a block

    def tail(self, more: int) -> int:
        """Of the window and `more` tokens."""
        return self.blocks(self.recent + more) + 1  # a window begins anywhere in a block

    def charged(self, max_model_len: int) -> int:
        """What a request holds while it decodes, and its share of what prompts take meanwhile.

        Few prompts are read at once: charging every request for two ends of chunks would cost a
        tenth of the capacity. Admission counts the real maximum."""
        blocks = self.sink_blocks + self.tail(SLACK) + self.blocks(self.page)
        return min(blocks, self.blocks(max_model_len))

    def at_prefill(self, tokens: int) -> int:
        """What a request comes to hold while `tokens` of its prompt are there: the sink, and the
        window before its new tokens and at their end."""
        return min(self.sink_blocks + 2 * self.tail(SLACK), self.blocks(tokens))

    def at_decode(self, tokens: int) -> int:
        """What a request of so many tokens holds between steps, at most."""
        return min(self.sink_blocks + self.tail(SLACK), self.blocks(tokens))
