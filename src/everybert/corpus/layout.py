"""How a family of models lays out its special tokens, and what a mask may touch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from everybert.errors import EverybertError

if TYPE_CHECKING:
    from everybert.text.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Layout:
    """The ids that examples are built with: [CLS] A [SEP] B [SEP] in BERT, <s> A </s></s> B </s> in RoBERTa."""

    cls_id: int
    sep_id: int
    pad_id: int
    mask_id: int
    vocab_size: int
    special_V: np.ndarray
    """bool: special tokens, which are neither masked nor drawn as replacements."""
    continues_V: np.ndarray
    """bool: pieces that continue a word."""
    pair_separators: int = 1
    """Separators between the two segments of a pair."""
    segments: bool = True
    """Whether the second segment has its own segment id."""

    @classmethod
    def of(cls, tokenizer: "Tokenizer") -> "Layout":
        """The layout that the tokenizer's own templates show."""
        needed = {"cls_id": "[CLS]", "sep_id": "[SEP]", "pad_id": "[PAD]", "mask_id": "[MASK]"}
        ids = {name: getattr(tokenizer, name) for name in needed}
        for name, token in needed.items():
            if ids[name] is None:
                raise EverybertError(f"the tokenizer has no {token} token, which pre-training needs")
        plain = next(i for i in range(tokenizer.size) if i not in tokenizer.special_ids)
        pair, segments = tokenizer.build([plain], [plain])
        special = np.zeros(tokenizer.size, bool)
        special[list(tokenizer.special_ids)] = True
        return cls(
            **ids,
            vocab_size=tokenizer.size,
            special_V=special,
            continues_V=np.asarray(tokenizer.continues_word(), bool),
            pair_separators=len(pair) - 4,
            segments=any(segments),
        )
