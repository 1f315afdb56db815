"""Stop strings on the device: a table that reads bytes, made once on the host.

A stop string may begin or end in the middle of a token, and can be spelled by many token sequences. So an automaton over
bytes (Aho and Corasick, 1975) is run over each vocabulary entry from each of its states; the sampler then needs one
look-up a token.
"""

import re
from collections import deque

import numpy as np


def token_bytes(tokenizer) -> list[bytes]:
    """The bytes that each token id stands for; special and added tokens stand for their names, so that a stop string may
    name one.

    Byte-level and SentencePiece-style vocabularies, and plain ones whose entries are the text itself.
    """
    size = max(tokenizer.get_vocab().values()) + 1
    named = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    decoder = str(tokenizer.backend_tokenizer.decoder)
    pieces = tokenizer.convert_ids_to_tokens(list(range(size)))
    if "ByteLevel" in decoder:
        table = _byte_level_table()
        convert = lambda piece: bytes(table[c] for c in piece) if all(c in table for c in piece) else piece.encode()
    else:
        convert = _sentencepiece_bytes
    plain = lambda number, piece: piece.encode() if number in named else convert(piece)
    return [b"" if piece is None else plain(number, piece) for number, piece in enumerate(pieces)]


def _byte_level_table() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _sentencepiece_bytes(piece: str) -> bytes:
    if re.fullmatch("<0x[0-9A-Fa-f]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


def _automaton(stops: tuple[bytes, ...]) -> tuple[np.ndarray, int]:
    """Transitions [states, 256] and the absorbing last state."""
    trie: list[dict[int, int]] = [{}]
    ends = set()
    for stop in stops:
        node = 0
        for byte in stop:
            if byte not in trie[node]:
                trie[node][byte] = len(trie)
                trie.append({})
            node = trie[node][byte]
        ends.add(node)
    found = len(trie)
    table = np.zeros((found + 1, 256), np.int32)
    fail = [0] * len(trie)
    queue = deque([0])
    while queue:
        node = queue.popleft()
        for byte in range(256):
            child = trie[node].get(byte)
            if child is None:
                table[node, byte] = table[fail[node], byte] if node else 0
            else:
                fail[child] = table[fail[node], byte] if node else 0
                table[node, byte] = child
                queue.append(child)
        if fail[node] in ends:
            ends.add(node)
    table[found] = found
    table[np.isin(table, sorted(ends))] = found
    return table, found


def stop_table(stops: tuple[str, ...], tokenizer, vocab_size: int) -> np.ndarray | None:
    """Next state [states, vocab_size] for each state and token; state 0 begins, the last one means: a stop was written.

    None without stop strings. Raises ValueError for an empty string.
    """
    if not stops:
        return None
    if any(not stop for stop in stops):
        raise ValueError("stop: an empty string would end every completion at once")
    table, _ = _automaton(tuple(stop.encode() for stop in stops))
    return read_vocabulary(table, token_bytes(tokenizer), vocab_size)


def read_vocabulary(table: np.ndarray, pieces: list[bytes], vocab_size: int) -> np.ndarray:
    """The state [states, vocab_size] after the bytes of each token, from each state of a table [states, 256].

    `pieces` are the bytes of the tokens; ids beyond them write nothing.
    """
    pieces = pieces[:vocab_size]
    pieces += [b""] * (vocab_size - len(pieces))
    lengths = np.array([len(piece) for piece in pieces])
    padded = np.zeros((vocab_size, max(1, lengths.max())), np.uint8)
    for number, piece in enumerate(pieces):
        padded[number, : len(piece)] = np.frombuffer(piece, np.uint8)
    state = np.repeat(np.arange(len(table), dtype=np.int32)[:, None], vocab_size, axis=1)
    for column in range(padded.shape[1]):
        state = np.where(lengths[None] > column, table[state, padded[None, :, column]], state)
    return state.astype(np.int32)
