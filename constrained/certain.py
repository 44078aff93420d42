"""Schemas on which nothing else depends: whose answer is asked of a value for certain, as a part of a conjunction.

``uniqueItems`` is kept by reading what was written, so it has to be known beforehand that it must hold: not one branch
of several, not under a negation, and not within items that are themselves kept apart.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .json_schema import Schemas


def uncertain_unique_items(schemas: "Schemas", root: int) -> list[str]:
    """Where ``uniqueItems`` stands in schemas that ``root`` reaches in another way than for certain."""
    values, formulas = schemas.values, schemas.formulas
    found: dict[str, None] = {}
    todo = [(root, True)]
    seen: set[tuple[int, bool]] = set()
    for formula, is_certain in todo:
        is_certain = is_certain and formulas.positive_clause(formula) is not None
        for schema, (_, node) in formulas.leaves(formula):
            if (schema, is_certain) in seen:
                continue
            seen.add((schema, is_certain))
            members, array = values.expand(schema, "object"), values.expand(schema, "array")
            of_members = is_certain and formulas.positive_clause(members) is not None
            rules = [leaf[1] for _, leaf in formulas.leaves(members) if leaf[0] == "props"]
            todo += [(inner, of_members) for rule in rules for inner in values.objects.properties.rules[rule].values]
            leaves = [leaf for _, leaf in formulas.leaves(array)]
            kinds = {leaf[0] for leaf in leaves}
            of_array = is_certain and formulas.positive_clause(array) is not None and "contains" not in kinds
            if "unique" in kinds and not of_array:
                found[schemas.pointer(node)] = None
            of_items = of_array and "unique" not in kinds
            todo += [(inner, of_items) for leaf in leaves if leaf[0] == "items" for inner in (*leaf[1], leaf[2])]
            todo += [(leaf[1], False) for leaf in leaves if leaf[0] == "contains"]
    return list(found)
