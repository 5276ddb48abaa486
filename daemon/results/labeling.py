"""The sink label-studio: tasks as other sinks write a file for each image, and beside their folder the labeling configuration
of a project for them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from daemon.config.loading import Config
from daemon.core.errors import NotWritable
from daemon.exports.label_studio import collect_labels, make_config, read_config
from daemon.ledger.record import Record
from daemon.results.files import FileSink, SinkFile, put_files, write_file
from daemon.system.mounts import KnownFolder


class LabelStudioSink(FileSink):
    """The configuration offers each label before a task has it. It is no file of the folder, which Label Studio reads whole."""

    def __init__(self, config: Config) -> None:
        super().__init__("label-studio", config)
        self._config = config.output.labeling_file
        self._beside = KnownFolder(os.fsencode(self._config.parent))
        self._has_boxes = "yolo" in config.stage_names

    def problem(self) -> str:
        try:
            self._read()
        except (NotWritable, OSError) as error:
            return str(error)
        return super().problem()

    def _write_all(self, records: Sequence[Record]) -> None:
        text = self._read()
        names = read_config(text)
        for record in records:
            collect_labels(self._answered(record), names)
        if (config := make_config(names, boxes=self._has_boxes)) != text:
            put_files(self._beside, [self._file(config)])
        super()._write_all(records)

    def _file(self, config: str) -> SinkFile:
        return SinkFile([os.fsencode(self._config)], partial(write_file, data=config.encode()))

    def _read(self) -> str:
        """Empty if there is none yet. Raises NotWritable, OSError."""
        try:
            text = Path(self._config).read_text("utf-8")
            read_config(text)
        except FileNotFoundError:
            return ""
        except ValueError:
            raise NotWritable(
                f"{self._config} is not the labeling configuration of this sink: move it away"
            ) from None
        return text
