"""``fsdp2.recordings``: what ``fsdp2.record`` and ``fsdp2.read_recordings`` return."""

from fsdp2._record.align import Arrivals, ClockOffset
from fsdp2._record.recording import Recording
from fsdp2._record.recordings import Recordings
from fsdp2._record.steps import RecordedStep

__all__ = ["Arrivals", "ClockOffset", "RecordedStep", "Recording", "Recordings"]
