"""All workloads by name, in the order of the table."""

from . import (
    beam_search,
    chat,
    generative_agents,
    hellaswag,
    json_extraction,
    llm_judge,
    long_document,
    mmlu,
    rag,
    react,
    self_consistency,
    skeleton_of_thought,
    tree_of_thought,
)
from .workload import Workload

WORKLOADS: dict[str, Workload] = {
    one.name: one
    for one in (
        mmlu.WORKLOAD,
        hellaswag.WORKLOAD,
        react.WORKLOAD,
        generative_agents.WORKLOAD,
        tree_of_thought.WORKLOAD,
        skeleton_of_thought.WORKLOAD,
        llm_judge.WORKLOAD,
        json_extraction.BY_REGEX,
        json_extraction.BY_SCHEMA,
        chat.SHORT,
        chat.LONG,
        rag.WORKLOAD,
        self_consistency.WORKLOAD,
        long_document.WORKLOAD,
        beam_search.WORKLOAD,
    )
}
