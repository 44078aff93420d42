"""Where ``uniqueItems`` can be held: not where it may have to be broken, nor where its answer cannot be known in time.

It is held by reading what was written, so nothing may ask for arrays without it: no negation of a schema that has it,
which ``oneOf`` of overlapping branches is too, and no count of items that have it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .json_schema import Schemas

OF_NO_VALUE = ("has", "names", "minp", "maxp")  # leaves that ask nothing of an object's values


def unheld_unique_items(schemas: "Schemas", root: int) -> list[str]:
    """Where ``uniqueItems`` stands in schemas that ``root`` may ask to be broken. Raises GrammarTooComplex for arrays
    of more items than there may be different ones."""
    values, formulas = schemas.values, schemas.formulas
    found: dict[str, None] = {}
    todo = [(root, True)]
    seen: set[tuple[int, bool]] = set()

    def is_positive(formula: int) -> bool:
        literals = [(formulas.nodes[p][1][0], sign) for p, sign in formulas.polarities(formula)]
        return all(leaf != "contains" and (sign or leaf in OF_NO_VALUE) for leaf, sign in literals)

    for formula, is_asked in todo:
        is_asked = is_asked and is_positive(formula)
        for schema, (_, node) in formulas.leaves(formula):
            if (schema, is_asked) in seen:
                continue
            seen.add((schema, is_asked))
            members, array = values.expand(schema, "object"), values.expand(schema, "array")
            rules = [leaf[1] for _, leaf in formulas.leaves(members) if leaf[0] == "props"]
            of_members = is_asked and is_positive(members)
            todo += [(inner, of_members) for rule in rules for inner in values.objects.properties.rules[rule].values]
            leaves = [leaf for _, leaf in formulas.leaves(array)]
            of_items = is_asked and is_positive(array)
            if any(leaf[0] == "unique" for leaf in leaves):
                if not of_items:
                    found[schemas.pointer(node)] = None
                else:
                    values.arrays.check_clauses(array)
                of_items = False  # of which each must not equal those before it
            todo += [(inner, of_items) for leaf in leaves if leaf[0] == "items" for inner in (*leaf[1], leaf[2])]
            todo += [(leaf[1], False) for leaf in leaves if leaf[0] == "contains"]
    return list(found)
