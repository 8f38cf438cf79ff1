"""The capture agent: takes an inference engine's routing and sends it to a server.

CaptureAgent(AgentConfig(target, engine_id, layout)) is all that an engine adapter needs.
"""

from routetrace.capture_agent.agent import CaptureAgent
from routetrace.capture_agent.config import AgentConfig
from routetrace.capture_agent.counters import AgentStats, CloseReport
from routetrace.common.layout import ModelLayout

__all__ = ["AgentConfig", "AgentStats", "CaptureAgent", "CloseReport", "ModelLayout"]
