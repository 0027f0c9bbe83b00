"""llama.cpp as a reference for tokenisation: the vocabularies of its own tests, and its way of cutting text.

Both lie in the source package of llama-cpp-python on the package index, 77 MB, which the slow tests fetch once. What is
small enough is committed as `tests/data/pieces.json`: the pieces into which llama.cpp cuts TEXTS, by pre-tokeniser. Made anew:

    python -m tests.tokenizer.llama_cpp        needs a C++ compiler; about a minute
"""

import json
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from kvant.config.environment import read_environment
from kvant.tokenizer.pretokenizers import PRE_TOKENIZERS
from tests.tokenizer.conftest import NASTY

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
TREE = f"{PACKAGE.replace('-', '_')}-{VERSION}/vendor/llama.cpp"
WANTED = re.compile(rf"{re.escape(TREE)}/(models/ggml-vocab-[^/]*|src/(unicode[^/]*|llama-vocab\.cpp))")
PIECES = Path(__file__).parent.parent / "data" / "pieces.json"
BETWEEN_TEXTS = "\n__ggml_vocab_test__\n"
SEPARATOR = "\x02"  # of what goes to the driver and comes back; no text holds it

TEXTS = [
    *(text for text in NASTY if text),
    "ied 4 ½ months", "Äpfel ÉCOLE naïve ŁÓDŹ", "IÌM WE'RE I'LLx it'S", "HTTPServer XMLHttpRequest iPhone5s",
    "3333333 1234567890 1,234 007", "路边的ひらがなカタカナ한국어mixed中文", "\r\n\r\n x\r y", "a\n\n\n\nb  \n  c",
    " / // \\ \\\\ /\n", "ǅungla ʰʷ ªº ჰაე ᲐᲑ Ωмега ﬁnally", "\u2126 \u212b \u00e9 e\u0301 \u1e69 s\u0323\u0307",
    "<|begin▁of▁sentence|>x", "@user #tag $x ^y `z` ~/.a",
]  # fmt: skip

DRIVER = r"""
#include "unicode.h"
#include <fstream>
#include <iostream>
#include <sstream>

static std::vector<std::string> read(const char* path) {
  std::stringstream all;
  all << std::ifstream(path, std::ios::binary).rdbuf();
  std::vector<std::string> parts;
  for (std::string part; std::getline(all, part, '\x02');) parts.push_back(part);
  return parts;
}

int main(int, char** argv) {
  for (const std::string& text : read(argv[2])) {
    for (const std::string& piece : unicode_regex_split(text, read(argv[1]), false)) std::cout << piece << '\x02';
    std::cout << '\x02';
  }
}
"""


def fetch() -> Path:
    """llama.cpp's tree, as far as it is wanted."""
    home = read_environment().cache / "peers" / f"llama.cpp-{VERSION}-vocabularies"
    if not (home / TREE).is_dir():
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home) as folder:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            subprocess.run([*pip, f"--no-binary={PACKAGE}", f"{PACKAGE}=={VERSION}", "--dest", folder], check=True)
            with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
                members = [member for member in archive.getmembers() if WANTED.fullmatch(member.name)]
                archive.extractall(Path(folder) / "unpacked", members, filter="data")
            (Path(folder) / "unpacked" / TREE.partition("/")[0]).rename(home / TREE.partition("/")[0])
    return home / TREE


def pairs(vocabulary: Path) -> list[tuple[str, list[int]]]:
    """The texts and ids that belong to a vocabulary, without BOS."""
    with open(f"{vocabulary}.inp", encoding="utf-8", newline="") as file:
        texts = file.read().split(BETWEEN_TEXTS)
    ids = [[int(number) for number in line.split()] for line in Path(f"{vocabulary}.out").read_text().splitlines()]
    assert 40 < len(ids) <= len(texts) <= len(ids) + 1  # most files end with a separator
    return list(zip(texts, ids, strict=False))


# --- pieces -------------------------------------------------------------------------------------------------------------


def patterns(source: str) -> dict[str, list[str]]:
    """llama.cpp's patterns by the name that a GGUF file gives."""
    by_kind: dict[str, list[str]] = {}
    label = r"(?:case LLAMA_VOCAB_PRE_TYPE_\w+|default):\s*(?://[^\n]*\s*)*"
    cases = rf"((?:{label})+)regex_exprs = \{{(.*?)\n\s*\}};"
    for names, body in re.findall(cases, source, re.DOTALL):
        lines = (re.match(r'\s*"((?:[^"\\]|\\.)*)"', line) for line in body.splitlines())
        found = [_unescaped(line[1]) for line in lines if line]
        by_kind |= dict.fromkeys(re.findall(r"PRE_TYPE_(\w+):", names) or ["DEFAULT"], found)
    by_name, waiting = {}, []
    for name, kind in re.findall(r'tokenizer_pre == "([^"]+)"|pre_type = LLAMA_VOCAB_PRE_TYPE_(\w+);', source):
        waiting.append(name)
        if kind:
            by_name |= {waited: by_kind[kind] for waited in waiting if waited and kind in by_kind}
            waiting = []
    return by_name


def _unescaped(literal: str) -> str:
    return re.sub(r"\\(.)", lambda match: {"n": "\n", "r": "\r", "t": "\t"}.get(match[1], match[1]), literal)


def make_pieces() -> None:
    tree = fetch()
    by_name = patterns((tree / "src" / "llama-vocab.cpp").read_text("utf-8"))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "driver.cpp").write_text(DRIVER)
        files = [tree / "src" / name for name in ("unicode.cpp", "unicode-data.cpp")]
        command = ["g++", "-O1", "-w", "-std=c++17", f"-I{tree / 'src'}", str(folder / "driver.cpp"), *map(str, files)]
        subprocess.run([*command, "-o", str(folder / "driver")], check=True)
        (folder / "texts").write_bytes(SEPARATOR.join(TEXTS).encode())
        lengths = {}
        for name in sorted(PRE_TOKENIZERS):
            (folder / "patterns").write_bytes(SEPARATOR.join(by_name[name]).encode())
            call = [str(folder / part) for part in ("driver", "patterns", "texts")]
            out = subprocess.run(call, check=True, capture_output=True).stdout.decode()
            rows = [row.split(SEPARATOR) for row in out.removesuffix(SEPARATOR * 2).split(SEPARATOR * 2)]
            assert ["".join(row) for row in rows] == TEXTS
            lengths[name] = [[len(piece) for piece in row] for row in rows]
    source = f"llama.cpp of {PACKAGE} {VERSION}: lengths of the pieces, in characters, of every text, by pre-tokeniser"
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row, separators=(',', ':'))}" for name, row in lengths.items())
    texts = json.dumps(TEXTS)
    PIECES.write_text(f'{{"source": {json.dumps(source)},\n "texts": {texts},\n "lengths": {{\n{rows}\n}}}}\n')


if __name__ == "__main__":
    make_pieces()
