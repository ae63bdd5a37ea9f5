"""The tokenizer of a run, and the text of a response."""

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlplus.train.config import ModelConfig, read_chat_template

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

UTF8_BYTES = 4  # bytes of a character at most


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, its id the byte's value, and <|pad|> 256, <|endoftext|> 257: any text comes back exactly.

    The two special tokens exist as ids only. Text that spells one of them is encoded as bytes, so no prompt can end a
    sequence or look like padding; the role markers of the chat template are plain text too.
    """
    tokenizer = Tokenizer(models.BPE(vocab={sign: byte for byte, sign in enumerate(_byte_signs())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|pad|>", "<|endoftext|>"])  # their order is the order of their ids
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _byte_signs() -> list[str]:
    """The printable character that the byte-level pre-tokenizer uses for each byte: itself, or the next from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def load_tokenizer(model: ModelConfig, path: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer in `path`, by default the model's, with a pad token (else the end token) and `model.chat_template`.

    ValueError if there is none, it has no end token, or the template cannot be read.
    """
    path = path or model.path
    tokenizer = byte_tokenizer() if path is None else _read_tokenizer(path, model.trust_remote_code)
    if model.chat_template is not None:
        tokenizer.chat_template = read_chat_template(model.chat_template)
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
    """Token ids of each text. special: with the tokenizer's default special tokens.

    ValueError where it cannot encode one, such as a word that it does not know if it has no token for these.
    """
    if not texts:
        return []
    try:
        ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=special).input_ids
    except Exception as error:  # its library raises plain ones
        name = tokenizer.name_or_path
        raise ValueError(f"the tokenizer of {name!r} cannot encode a text: {' '.join(str(error).split())}") from error
    return ids


def response_text(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], prefix: str | None, ends: Sequence[int] = ()
) -> str:
    """A response as it is graded and shown: `data.response_prefix` and its tokens' text, without special tokens.

    ends: the run's `find_ends`, which need not be special tokens: one at the end is left out, too.
    """
    ended = tokens and tokens[-1] in ends
    text: str = tokenizer.decode(list(tokens[:-1] if ended else tokens), skip_special_tokens=True)
    return (prefix or "") + text


def token_texts(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """The text of each token, special ones included; joined, they are the text of all.

    A character that several tokens spell is the last one's, and the others are empty.
    """

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)

    alone = {token: decode([token]) for token in set(tokens)}
    texts = [alone[token] for token in tokens]
    if "".join(texts) == decode(tokens):
        return texts
    # Some have bytes of a character, or depend on those before them: the text that each adds to a short window.
    texts = []
    start = 0
    read = 0
    for stop in range(1, len(tokens) + 1):
        text = decode(tokens[start:stop])
        pending = text.endswith("\ufffd") and stop - read < UTF8_BYTES and stop < len(tokens)
        texts.append("" if pending else text[len(decode(tokens[start:read])) :])
        if not pending:
            start = read
            read = stop
    return texts


def _read_tokenizer(path: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # foreign files can raise anything
        reason = " ".join(str(error).split()) or repr(error)
        raise ValueError(f"want a folder or a hub name with a tokenizer as model.path {path!r}: {reason}") from error
    if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_tokens):  # transformers' answer to missing files
        raise ValueError(f"want a folder or a hub name with a tokenizer as model.path {path!r}: it has none")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"want a tokenizer with an end token (eos_token); the one of {path!r} has none")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
