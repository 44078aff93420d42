"""The texts that a quantized model is measured on where the user gives none."""

DOCUMENT = """\
The orchard on the north slope was planted in the spring of 1931, when the valley road was still gravel and the \
nearest station lay two hours away by cart. Old Marten Hale set two hundred apple trees in rows of twenty, leaving \
eight paces between the trunks so that a horse could turn. He chose four kinds: a sharp green cooker for the bakers in \
town, a small red dessert apple that kept until March, a russet with rough skin that his wife liked best, and a yellow \
cider apple that nobody could eat from the hand. The first real harvest came in 1936. It filled ninety crates, and the \
crates were sold before they reached the market square.

A tree does not feed itself from the ground alone. Water and minerals climb from the roots through the wood, but the \
sugar that builds new growth is made in the leaves, and it has to travel the other way. It moves through a thin layer \
of living tissue just beneath the bark. If a deer or a careless mower strips a ring of bark from the trunk, the leaves \
stay green for weeks, because water still rises, and yet the roots begin to starve. By the time the crown looks ill \
there is little left to save. Marten's grandson Owen learned this in the winter of 1974, when voles tunnelled under \
the snow and ringed thirty-one young trees in a single month. He saved nineteen of them by bridge grafting: he cut \
thin shoots from healthy branches, sharpened both ends, and set them across the wound like the rungs of a ladder, so \
that the sugar could go round the gap.

Every tree on the slope is two plants joined together. The upper part, called the scion, decides what fruit will grow. \
The lower part, the rootstock, decides how tall the tree becomes, how soon it bears, and how well it stands drought. A \
seedling grown from a pip is never the same as its parent, so an orchard that wants two hundred equal trees has to \
take two hundred cuttings from one. The russet on the slope goes back, cut after cut, to a single tree behind a mill \
that was pulled down before anybody now living was born. In this sense the tree has never died; it has only been \
moved.

Pruning is done between January and the middle of March, on dry days when the temperature stays above minus five. The \
aim is to let light reach every branch. A good pruner, Owen used to say, leaves a tree through which a bird could fly \
without folding its wings. Three kinds of wood are taken out first: what is dead, what is sick, and what crosses and \
rubs. After that the work becomes a matter of judgement. Cut too little and the fruit stays small and pale; cut too \
much and the tree answers with a thicket of upright shoots that bear nothing for three years. A skilled worker \
finishes fourteen trees a day, a beginner five or six.

The pests come in their order. In April the blossom weevil lays one egg in each bud; in June the codling moth looks \
for young fruit; in August the wasps arrive to eat whatever the birds have opened. For thirty years the answer was a \
barrel and a spray. Since 1998 the orchard has worked without it. Strips of meadow were sown between the rows, and the \
flowers there feed small wasps that hunt the caterpillars. Eleven boxes for blue tits hang along the eastern hedge, \
and one pair with a hungry brood carries some four hundred caterpillars a day to the nest. About a tenth of the crop \
is lost all the same. Owen's daughter Ruth, who took over in 2009, counts that tenth as wages.

Picking begins with the green cooker at the end of August and ends with the russet in the last week of October. An \
apple is ripe when it comes away with a quarter turn of the wrist and keeps its stalk. Fruit that falls goes to the \
press, never to the crates, for a bruise the size of a thumbnail spoils a whole box by Christmas. The pickers are paid \
by the hour and not by the crate, which is unusual in the valley. Ruth has written down the result: since the change \
in 2012 the pickers fill twelve crates a day instead of fifteen, but the share of bruised fruit has fallen from nine \
in a hundred to two, and the store now lasts until April.

The store itself is the oldest building on the farm, a stone cellar cut into the slope, facing north, with walls as \
thick as a man's arm is long. It needs no machine. Cold air sinks in through a grating at night and is shut in by day. \
From November to February the thermometer stays between two and four degrees. The shelves are of ash, washed with soda \
every summer, and the apples lie on them in one layer, not touching. Once a week somebody walks along the shelves with \
a lamp and a basket, and takes out whatever has begun to turn."""

PROMPTS = (
    "Write a short story about a lighthouse keeper.",
    "Why is the sky blue?",
    "Give me three ideas for a birthday party.",
    "Explain how a bicycle stays upright.",
    "Write a Python function that reverses a list.",
    "What should I pack for a week in the mountains?",
    "Summarise what a library does for a town.",
    "Translate into French: the train leaves at noon.",
)
