"""everybert: the whole BERT family, from raw text to a served model and a look inside it.

Importing this package is quick: torch is loaded when a model first is.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "1.0.0"

if TYPE_CHECKING:
    from everybert.errors import EverybertError as EverybertError
    from everybert.evaluation.doctor import doctor as doctor
    from everybert.evaluation.evaluate import evaluate as evaluate
    from everybert.inference.model import Model as Model
    from everybert.inference.model import load as load
    from everybert.model.config import EncoderConfig as EncoderConfig
    from everybert.text.tokenizer import Tokenizer as Tokenizer
    from everybert.training.finetune import finetune as finetune
    from everybert.training.pretrain import pretrain as pretrain

_WHERE = {
    "load": "everybert.inference.model",
    "Model": "everybert.inference.model",
    "EncoderConfig": "everybert.model.config",
    "Tokenizer": "everybert.text.tokenizer",
    "EverybertError": "everybert.errors",
    "doctor": "everybert.evaluation.doctor",
    "evaluate": "everybert.evaluation.evaluate",
    "finetune": "everybert.training.finetune",
    "pretrain": "everybert.training.pretrain",
}

__all__ = [*_WHERE, "__version__"]


def __getattr__(name: str) -> Any:
    """Load a public name from its room on first use (PEP 562)."""
    if name not in _WHERE:
        raise AttributeError(f"module 'everybert' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
