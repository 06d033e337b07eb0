"""Settings of teachers, and devices of all servers that score."""

from __future__ import annotations

from asyncrl.base.extensions import AddedField
from asyncrl.config.device_forms import ServerDevices
from asyncrl.extensions.scoring.teacher_config import TeacherConfig, Teachers

TEACHER = AddedField[TeacherConfig | list[TeacherConfig] | None](
    "teacher",
    Teachers | None,
    "A model for on-policy distillation, or a list of several (none = off).",
    None,
)
OF_RUN = (TEACHER,)

TEACHER_DEVICE = AddedField[ServerDevices](
    "teacher",
    ServerDevices,
    "Device of the teacher: cpu or a CUDA device number (auto = an unused device, else "
    "an engine's). A list like [4, 5] or a range like 4-7 has a copy on each of its "
    "devices, which share the calls.",
    "auto",
)
JUDGE_DEVICE = AddedField[ServerDevices](
    "judge",
    ServerDevices,
    "Device of a judge without base_url, in the forms of placement.teacher.",
    "auto",
)
REWARD_DEVICE = AddedField[ServerDevices](
    "reward",
    ServerDevices,
    "Device of the reward model (task.reward.model), in the forms of placement.teacher.",
    "auto",
)
OF_PLACEMENT = (TEACHER_DEVICE, JUDGE_DEVICE, REWARD_DEVICE)
