"""LangChain through ``langchain-openai``: a chain, a stream, a typed answer and a tool call, all from a local server.

pip install langchain-openai
phloem serve smollm2 &
python examples/interop/langchain_chat.py
"""

import argparse

from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    country: str = Field(max_length=20)


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"It is sunny in {city}."


def main(base_url: str, model: str = "smollm2") -> dict:
    llm = ChatOpenAI(base_url=base_url, api_key="none", model=model, temperature=0, max_tokens=40)

    prompt = ChatPromptTemplate.from_messages([("system", "You answer in one short sentence."), ("user", "{question}")])
    chain = prompt | llm
    answer = chain.invoke({"question": "What is the capital of France?"})
    print(answer.content)

    pieces = [chunk.content for chunk in chain.stream({"question": "What is the capital of Italy?"})]
    print("".join(pieces))

    typed = llm.with_structured_output(City, method="json_schema")
    city = typed.invoke("Fill in as JSON: Berlin is the capital of Germany.")
    print(repr(city))

    called = llm.bind_tools([weather], tool_choice="weather").invoke("What is the weather in Oslo?")
    print(called.tool_calls[0]["name"], called.tool_calls[0]["args"])
    return {"answer": answer, "pieces": pieces, "city": city, "calls": called.tool_calls}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    main(parser.parse_args().base_url)
