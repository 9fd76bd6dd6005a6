"""``fsdp2.recordings``: result types of ``fsdp2.record`` and ``fsdp2.read_recordings``."""

from fsdp2._tools.record.align import Arrivals, ClockOffset
from fsdp2._tools.record.recording import Recording
from fsdp2._tools.record.recordings import Recordings
from fsdp2._tools.record.steps import RecordedStep

__all__ = ["Arrivals", "ClockOffset", "RecordedStep", "Recording", "Recordings"]
