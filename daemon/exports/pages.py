"""A file for each image: its caption as text; its lines of text as hOCR (http://kba.github.io/hocr-spec/1.2) or ALTO 4
(https://www.loc.gov/standards/alto); caption, tags and objects as XMP (https://github.com/adobe/xmp-docs), which photo
programs read beside the image."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TextIO

from daemon.exports.answered import CONTROLS, Answered
from stages.ocr.descriptor import bounds_of

HOCR = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.0 Transitional//EN" "http://www.w3.org/TR/xhtml1/DTD/xhtml1-transitional.dtd">
<html xmlns="http://www.w3.org/1999/xhtml">
<head>
<title>{name}</title>
<meta http-equiv="Content-Type" content="text/html;charset=utf-8"/>
<meta name="ocr-system" content="{model}"/>
<meta name="ocr-capabilities" content="ocr_page ocr_par ocr_line ocrx_word"/>
</head>
<body>
<div class="ocr_page" id="page_1" title="image &quot;{name}&quot;; bbox 0 0 {width} {height}; ppageno 0">
{lines}
</div>
</body>
</html>
"""
ALTO = """<?xml version="1.0" encoding="UTF-8"?>
<alto xmlns="http://www.loc.gov/standards/alto/ns-v4#">
<Description>
<MeasurementUnit>pixel</MeasurementUnit>
<sourceImageInformation><fileName>{name}</fileName></sourceImageInformation>
<Processing ID="ocr"><processingSoftware><softwareName>{model}</softwareName></processingSoftware></Processing>
</Description>
<Layout>
<Page ID="page_1" PHYSICAL_IMG_NR="1" WIDTH="{width}" HEIGHT="{height}">
<PrintSpace HPOS="0" VPOS="0" WIDTH="{width}" HEIGHT="{height}">
<TextBlock ID="block_1" HPOS="0" VPOS="0" WIDTH="{width}" HEIGHT="{height}">
{lines}
</TextBlock>
</PrintSpace>
</Page>
</Layout>
</alto>
"""
XMP = """<?xpacket begin="\ufeff" id="W5M0MpCehiHzreSzNTczkc9d"?>
<x:xmpmeta xmlns:x="adobe:ns:meta/">
<rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">
<rdf:Description rdf:about="" xmlns:dc="http://purl.org/dc/elements/1.1/">
{parts}
</rdf:Description>
</rdf:RDF>
</x:xmpmeta>
<?xpacket end="w"?>
"""


def _clean(text: str) -> str:
    return escape(text.translate(CONTROLS))


def write_text(image: Answered) -> str:
    return f"{image.caption}\n" if image.caption else ""


def write_hocr(image: Answered) -> str:
    """Readers take the text from words in lines in paragraphs, so a line is one word, as nobody knows where its words are."""
    (width, height), lines = image.size, []
    for number, (text, score, corners) in enumerate(image.lines, 1):
        box = " ".join(str(round(value)) for value in bounds_of(corners))
        title = f"bbox {box}; x_wconf {round(100 * score)}"
        word = f'<span class="ocrx_word" id="word_{number}" title="{title}">{_clean(text)}</span>'
        lines.append(f'<span class="ocr_line" id="line_{number}" title="{title}">{word}</span>')
    if lines:
        lines = ['<p class="ocr_par">', *lines, "</p>"]
    lines += [
        f'<p class="ocr_par">{_clean(text)}</p>' for text in image.page_text.splitlines() if text.strip()
    ]
    model = _clean(image.models.get("ocr", ""))
    return HOCR.format(
        name=_clean(image.name.replace('"', "'")),
        model=model,
        width=width,
        height=height,
        lines="\n".join(lines),
    )


def write_alto(image: Answered) -> str:
    (width, height), lines = image.size, []
    for number, (text, score, corners) in enumerate(image.lines, 1):
        x0, y0, x1, y1 = map(round, bounds_of(corners))
        place = f'HPOS="{x0}" VPOS="{y0}" WIDTH="{x1 - x0}" HEIGHT="{y1 - y0}"'
        string = f'<String {place} WC="{score:.3f}" CONTENT="{_clean(text)}"/>'
        lines.append(f'<TextLine ID="line_{number}" {place}>{string}</TextLine>')
    for number, text in enumerate(filter(str.strip, image.page_text.splitlines()), 1):
        lines.append(f'<TextLine ID="line_{number}"><String CONTENT="{_clean(text)}"/></TextLine>')
    model = _clean(image.models.get("ocr", ""))
    return ALTO.format(
        name=_clean(image.name), model=model, width=width, height=height, lines="\n".join(lines)
    )


def write_xmp(image: Answered) -> str:
    """Caption as dc:description; as dc:subject objects, tags and, behind its name, what each classifier says: each once."""
    classes = [": ".join((*stage.split("_", 1)[1:], label)) for stage, label, _ in image.classes]
    labels = dict.fromkeys([label for label, *_ in image.objects + image.tags] + classes)
    parts = []
    if image.caption:
        caption = f'<rdf:li xml:lang="x-default">{_clean(image.caption)}</rdf:li>'
        parts.append(f"<dc:description><rdf:Alt>{caption}</rdf:Alt></dc:description>")
    if labels:
        subjects = "".join(f"<rdf:li>{_clean(label)}</rdf:li>" for label in labels)
        parts.append(f"<dc:subject><rdf:Bag>{subjects}</rdf:Bag></dc:subject>")
    return XMP.format(parts="\n".join(parts))


@dataclass(frozen=True)
class PageFormat:
    """A file for each image of which `make` says something. replaces: the suffix takes the place of the image's own; otherwise
    it comes behind: a.jpg.txt."""

    suffix: str
    make: Callable[[Answered], str]
    replaces: bool = False

    def write(self, folder: Path, images: Iterator[Answered]) -> None:
        for image in images:
            if text := self.make(image):
                name = Path(image.name)
                short = (
                    name.with_suffix(self.suffix)
                    if self.replaces
                    else name.with_name(name.name + self.suffix)
                )
                with _open_new(folder, short, Path(image.own_name(self.suffix))) as file:
                    file.write(text)


def _open_new(folder: Path, name: Path, other: Path) -> TextIO:
    """A new file with this name. If another image has a file or folder with it, or it is too long: with the other one, or that
    with a further number, at the top of the folder."""
    further = (other.with_stem(f"{other.stem}-{number}") for number in itertools.count(2))
    for place in itertools.chain((name, Path(other.name)), (Path(each.name) for each in further)):
        try:
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            return (folder / place).open("x", encoding="utf-8", newline="\n")
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG):
                raise
    raise AssertionError


PAGES: dict[str, PageFormat] = {
    "captions": PageFormat(".txt", write_text, replaces=True),
    "hocr": PageFormat(".hocr", write_hocr),
    "alto": PageFormat(".alto.xml", write_alto),
    "xmp": PageFormat(".xmp", write_xmp),
    "xmp-adobe": PageFormat(".xmp", write_xmp, replaces=True),
}
