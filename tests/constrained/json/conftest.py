import pytest
from phloem.constrained import Vocabulary
from phloem.constrained.json.json_schema import Schemas
from phloem.constrained.json.scalars import Scalars
from phloem.constrained.machine import Machine


@pytest.fixture
def schemas(vocabulary: Vocabulary) -> Schemas:
    """Schemas on a new machine, with properties in any order."""
    machine = Machine(vocabulary)
    scalars = Scalars(machine)
    return Schemas(machine, scalars, white_space="compact", any_order=True, canonical=False, enforce_formats=False)
