"""Environments and tools as other libraries have them: OpenEnv, SkyRL-gym, verl, pydantic."""

from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

from pydantic import BaseModel, Field


class Observation(BaseModel):
    """OpenEnv's base class."""

    done: bool = False
    reward: float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class Cell(Observation):
    """Where the policy is."""

    x: int
    y: int
    message: str


class Echo(Observation):
    """What it wrote."""

    echoed: str


@dataclass
class StepResult:
    """OpenEnv's, of a client."""

    observation: Any
    reward: float | None = None
    done: bool = False


class Grid:
    """OpenEnv's environment, whose observations have fields of their own."""

    def reset(self, seed: int | None = None, episode_id: str | None = None) -> Cell:
        return Cell(x=0, y=1, message="go", metadata={"hidden": 1})

    def step(self, action: str, timeout_s: float | None = None, **others: Any) -> Cell:
        return Cell(x=1, y=0, message=action, reward=0.5, done=action == "end")


class Remote(Grid):
    """The same through a client."""

    def reset(self, **row: Any) -> Any:  # type: ignore[override]
        return StepResult(Echo(echoed="ready"))

    def step(self, action: str, **others: Any) -> Any:  # type: ignore[override]
        return StepResult(super().step(action), 0.25, action == "end")


class Dicts:
    """gymnasium's with a space of dicts, and a step without a name for its observation."""

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return {"x": 1, "y": 2}, {"hidden": 1}

    def step(self, action: str) -> Any:
        return {"x": 3, "reward": 1.0, "done": action == "end", "info": {"hidden": 1}}


class Blocks:
    """TRL's environment whose ``reset`` returns parts of a message."""

    def reset(self, kind: str, **row: Any) -> Any:
        if kind == "text":
            return [{"type": "text", "text": " Look"}, {"type": "text", "text": " up."}]
        if kind == "messages":
            return [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
        if kind == "dict":
            return {"room": 3, "door": "open"}
        return [{"type": "image", "image": b""}]

    def look(self) -> str:
        """Look."""
        return "x"


@dataclass
class SearchConfig:
    """A configuration as SkyRL-gym's SearchEnv has it."""

    search_url: str = "http://127.0.0.1:8000"
    topk: int = 3


class Search:
    """SkyRL-gym's environment whose configuration is a dataclass."""

    def __init__(self, env_config: SearchConfig | dict[str, Any], extras: dict[str, Any]) -> None:
        self.said = f"{env_config.search_url} {env_config.topk}"  # type: ignore[union-attr]

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        said = {"role": "user", "content": self.said}
        return {"observations": [said], "reward": 0.0, "done": False, "metadata": {}}


class Sql(Search):
    """One whose configuration is any object with attributes."""

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        self.said = f"{env_config.db.path} {env_config['topk']} {env_config.get('none')}"


class ToolResponse(BaseModel):
    """verl's."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


def scored(n: int) -> tuple[str, float, dict[str, Any]]:
    """Return a reward, too.

    Args:
        n: any number
    """
    return f"hi {n}", 0.5 * n, {"hits": n}


def responds() -> ToolResponse:
    """Return an object."""
    return ToolResponse(text="hi!")


def pair() -> tuple[str, float]:
    """Return two values, of which none is a reward."""
    return "AAPL", 187.2


def model() -> list[Any]:
    """Return pydantic's objects."""
    return [Cell(x=1, y=2, message="m")]


class Row(NamedTuple):
    """Three values that are no verl result."""

    a: int
    b: int
    c: str


def row() -> Any:
    """Return three values."""
    return Row(1, 2, "c")


class BaseTool:
    """verl's base class."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        return self.tool_schema


class Function(BaseModel):
    """verl's schema of a function."""

    name: str
    description: str
    parameters: dict[str, Any]


class Schema(BaseModel):
    """verl's schema of a tool."""

    type: str
    function: Function


class Solver(BaseTool):
    """verl's tool for GSM8K, with an instance for each trajectory."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self.instances: dict[str, dict[str, Any]] = {}

    def get_openai_tool_schema(self) -> Any:
        parameters = {"type": "object", "properties": {"answer": {"type": "string"}}}
        function = {"name": "check", "description": "Check.", "parameters": parameters}
        return Schema(type="function", function=Function.model_validate(function))

    async def create(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        instance_id = instance_id or str(uuid4())
        ground_truth = ground_truth or kwargs.get("create_kwargs", {}).get("ground_truth")
        self.instances[instance_id] = {"truth": ground_truth, "reward": 0.0}
        return instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        own = self.instances[instance_id]
        right = float(parameters["answer"] == own["truth"])
        earned, own["reward"] = (0.0 if right > own["reward"] else -0.05), right
        return ToolResponse(text=f"{right} of {self.config['scale']}"), earned, {"right": right}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(self.instances[instance_id]["reward"])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.instances[instance_id]
