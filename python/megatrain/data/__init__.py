"""From files to micro-batches. Read in the order of the data: sources (lines, tables, plain_text), shapes, chat
(spans), encode (workers), store, pieces, packing or padding, loader; corpus and division look at a source as a
whole. Needs torch, transformers and numpy; Parquet, Arrow and Hugging Face datasets need the extra "data"."""

from .corpus import BadLines, Corpus, look
from .encode import Encoder
from .loader import Loader, in_order
from .packing import Batch, PackedRows, pack
from .padding import PaddedRows
from .pieces import Pieces, PieceWriter
from .records import BadRecord, DataError, Record
from .sources import Source, open_source
from .store import TokenStore, TokenWriter
from .text_tokenizer import TextTokenizer
from .workers import WorkerError

__all__ = [
    "BadLines",
    "BadRecord",
    "Batch",
    "Corpus",
    "DataError",
    "Encoder",
    "Loader",
    "PackedRows",
    "PaddedRows",
    "PieceWriter",
    "Pieces",
    "Record",
    "Source",
    "TextTokenizer",
    "TokenStore",
    "TokenWriter",
    "WorkerError",
    "in_order",
    "look",
    "open_source",
    "pack",
]
