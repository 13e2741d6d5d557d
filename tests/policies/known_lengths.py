"""What a server may have seen of output lengths."""

from dataclasses import replace
from functools import reduce

from ellm_sgl.policies.lengths import OutputLengths, Seen

TO_THE_BOUND = replace(
    OutputLengths.nothing(),
    seen=reduce(lambda seen, _: seen.and_one(10**6, True), range(2000), Seen.nothing()),
)
"""As far as anybody knows no answer ends by itself."""
