"""A plug-in whose descriptor imports more than it should."""

import wave

from stages.contract.descriptor import Backend, Descriptor
from stages.contract.options import FakeOptions
from stages.yolo.descriptor import Detection

assert wave
HEAVY = Descriptor(
    name="heavy",
    key="heavy",
    result=Detection,
    backends={"b": Backend(place="nowhere:Stage", options=FakeOptions)},
)
