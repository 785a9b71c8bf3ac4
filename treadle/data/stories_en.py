"""The English stories, in the notation of `treadle.data.stories`."""

LANGUAGE = "en"

LABELS = {
    "m": {"he": "he", "him": "him", "his": "his", "himself": "himself"},
    "f": {"he": "she", "him": "her", "his": "her", "himself": "herself"},
    "fly": {"move": "fly", "moved": "flew"},
    "climb": {"move": "climb", "moved": "climbed"},
}

NAMES = {
    "h": {"m": "Tom Ben Max Sam", "f": "Lily Mia Anna Rosie"},
    "f": {"m": "Jack Oscar Felix Hugo", "f": "Nora Ruby Daisy Clara"},
}

POOLS = {
    "animal/g/tags": """fox/mf/; pig/mf/; goat/mf/; badger/mf/; lamb/mf/; dog/mf/; rabbit/mf/;
        bear/mf/; donkey/mf/; cat/mf/climb; squirrel/mf/climb; owl/mf/fly; crow/mf/fly;
        sparrow/mf/fly; frog/mf/swim; otter/mf/swim; beaver/mf/swim; turtle/mf/swim;
        mouse/mf/small; hedgehog/mf/small; mole/mf/small""",
    "adj": "little; young; brave; clever; shy; kind; curious; cheerful; gentle; quiet; funny",
    "home": """in the forest; near the river; on a hill; by the sea; on a farm; by the lake; behind
        the mill; in a green valley; near a small village; at the end of a long road""",
    "hobby": """sing; paint; read old books; tell stories; run in the grass; count the stars; pick
        flowers; watch the clouds; sleep in the sun; listen to the rain; dance""",
    "day": "sunny; warm; bright; quiet; cool; fine; beautiful; gray",
    "color": "red; blue; green; yellow; white; brown",
    "family": "grandmother; grandfather; aunt; uncle",
    "toy": "ball; drum; hat; scarf; ribbon; book; cup; basket; bell; doll",
    "light": "kite; balloon; hat; scarf; ribbon",
    "thing/mend": """boat/a hammer and some nails; cart/a hammer and some nails; kite/paper and
        glue; basket/some straw; drum/a piece of leather; chair/some wood; doll/a needle and some
        thread; sled/some wood""",
    "dish/some/need": """cake/a cake/eggs; cake/a cake/butter; pie/a pie/apples; pie/a pie/sugar;
        soup/soup/carrots; soup/soup/onions; pudding/a pudding/milk; bread/bread/flour""",
    "food": "pear; apple; orange; melon; peach; cake; pie",
    "fruit": "apples; pears; plums; nuts; cherries",
    "gift": """paper crown; necklace of shells; wooden boat; warm scarf; wooden flute; straw hat;
        little doll""",
    "plant": "pumpkin; sunflower; melon; rose; tomato; tulip",
    "skill": "sing; dance; whistle; read; paint; skate",
    "need/gift": """cold/a warm blanket; hungry/a bowl of soup; thirsty/a cup of milk; tired/a soft
        pillow; wet/a dry coat""",
    "inside": """under the bed; behind the door; in the kitchen; under the table; in the cupboard;
        on the shelf; behind the chair""",
    "outside": """behind the barn; under the bridge; in the tall grass; near the well; behind a big
        rock; under a bush; beside the path; near the old wall; under an oak tree""",
}

MACROS = {
    "open": """[Once upon a time there was {adj.a} {h.kind} named {h}. {h.He} lived {home}.|
        Once upon a time, {home}, there lived {adj.a} {h.kind} named {h}.|
        {h} was {adj.a} {h.kind} who lived {home}.|
        {Home} lived {adj.a} {h.kind} named {h}.|
        There was once {adj.a} {h.kind} named {h}. {h.His} [little|old|] house was {home}.]
        [{h.He} [liked|loved] to {hobby}.|{h.He} [liked|loved] to {hobby1} and to {hobby2}.||||]""",
    "when": "One {day} [morning|day|afternoon]",
    "meet": """[Just then, {f} the {f.kind} came by.|
        {f.A} named {f} was passing by and stopped.|
        {f} the {f.kind} saw {h.him} and came over.|
        {h.His} friend {f} the {f.kind} heard {h.him} and came running.]""",
    "wrong": """"[What is wrong|What is the matter|Why are you so sad|What happened]?" asked
        {f}.""",
    "calm": "[Do not worry|Do not be sad|Do not cry]",
    "thanks": """["Thank you, {f}!" said {h}.|
        "Thank you so much!" said {h} with a big smile.|
        {h} gave {f.him} a big hug. "You are a true friend," {h.he} said.|
        {h} jumped for joy. "Thank you, {f}!" {h.he} said.]""",
    "end": """[From that day on, {h} and {f} were [best|good] friends.|
        From that day on, {h} and {f} saw each other every day.|
        {h} never forgot [that day|how kind {f} had been].|
        That night, {h} fell asleep with a smile.|
        And they were both very happy.|
        <moral>]""",
    "homeward": """[<end>|
        The two friends walked home together.|
        The two friends sang all the way home.|
        {h} went home [tired but happy|with a happy heart].]""",
    "moral": """[{h} knew that a good friend is worth more than gold.|
        {h} had learned that everything is easier with a friend.|
        "It is good to have a friend," {h} thought.|
        "There is always a way," {h} thought.]""",
}

PLOTS = (
    # Something is lost.
    (
        "",
        "",
        """<open> {h.He} had a {color} {toy} [and took it everywhere|and loved it very much|that was
        a gift from {h.his} {family}]. <when>, the {toy} was gone! {h} looked {inside}, but [it was
        not there|{h.he} could not find it]. {h.He} [sat down and began to cry|felt very sad|did not
        know what to do]. <meet> <wrong> "I lost my {toy}," said {h}. "<calm>. [We will look for it
        together|Two friends see more than one|I will help you find it]," said {f}. [At last|After a
        long time|Suddenly], {f} saw something {color} {outside}. It was the {toy}! <thanks>
        <homeward>""",
    ),
    # The wind takes something up into a tree.
    (
        "!fly !climb",
        "fly climb",
        """<open> One windy day, {h.he} was playing with a {color} {light} [near the barn|in the
        field|by the river]. Suddenly, the wind [took the {light}|carried the {light} away] and left
        it at the top of a tall tree. {h} [jumped and jumped, but the tree was too high|tried with a
        long stick, but the stick was too short|threw a little stone, but it did not help]. <meet>
        <wrong> "My {light} is in the tree and I cannot reach it," said {h}. "<calm>. [I can
        {f.move}|That is easy for me]," said {f}. {f.He} {f.moved} to the top of the tree and
        brought the {light} down [very slowly|with great care]. <thanks> <homeward>""",
    ),
    # Something breaks.
    (
        "",
        "",
        """<open> {h.He} had made a {thing} all by {h.himself}, and {h.he} was very proud of it.
        <when>, [{h} fell on it|a big stone fell on it|a branch fell on it], and the {thing} broke.
        "[Oh no|My poor {thing}]!" cried {h}, with tears in {h.his} eyes. <meet> "<calm>. [I have
        {thing.mend} at home|With {thing.mend} we can mend it]," said {f}. They sat [under a tree|at
        the table|by the fire] and worked [for a long time|until the evening]. [{h} held the {thing}
        and {f} did the rest.|] When they finished, it was [even better than before|as good as new].
        <thanks> <end>""",
    ),
    # The kitchen lacks something.
    (
        "",
        "",
        """<open> <when>, {h} wanted to make {dish.some} for {h.his} {family}. {h.He} looked in the
        kitchen, but {h.he} had no {dish.need}. ["I cannot make {dish.some} without {dish.need},"
        {h.he} thought.|] So {h.he} walked to the house of {f} the {f.kind} and knocked on the door.
        "Hello, {f}. Do you have any {dish.need}?" {h.he} asked. "[Of course|Yes, I do]! Take [all
        you need|as much as you want]," said {f}. "[May|Can] I help you?" The two friends [worked
        together|sang while they worked], and soon the whole house smelled of {dish}. [Everyone
        said|{h.His} {family} said] it was the best {dish} in the [village|world]. <end>""",
    ),
    # Somebody new is alone.
    (
        "",
        "",
        """<open> <when>, {h} saw {f.a} who was sitting alone {outside}. {f.He} was new in the
        village and [did not know anyone|had no friends]. "Hello, my name is {h}. What is your
        name?" asked {h}. "I am {f}," said the {f.kind} in a [small|soft] voice. "Do you want to
        [play with my {toy}|run to the river with me|play with me]?" asked {h}. ["I do not know
        how," said {f}. "<calm>. It is easy, and I will show you," said {h}.|"Yes, please," said
        {f}.] They [ran, jumped and laughed|played and laughed] until the sun went down. "Will you
        come back tomorrow?" asked {f}. "[Tomorrow and every day|Of course]!" said {h}. [For the
        first time in many days, {f} was not lonely.|<homeward>]""",
    ),
    # A noise in the night.
    (
        "!small",
        "small",
        """<open> One [dark|cold|windy] night, {h} heard a strange noise {inside}. {h.He} was so
        afraid that {h.he} hid under the blanket. ["It is a monster," {h.he} whispered.|Tap, tap,
        tap, went the noise.] But {h.he} wanted to be brave, so {h.he} took a lamp and came closer,
        step by step. There was no monster! It was only {f.a} with [wet paws|big round eyes].
        "Please do not be angry," said the {f.kind}. "My name is {f}, and I am {need}." {h} laughed
        and gave {f.him} {need.gift}. "You can stay here tonight," {h.he} said. [And {h} was not
        afraid anymore.|The two friends talked until morning.|From that night on, {h} and {f} were
        good friends.]""",
    ),
    # A birthday, and no money.
    (
        "",
        "",
        """<open> It was the day before the birthday of {f} the {f.kind}, and {h} wanted to give
        {f.him} a present. But {h.he} had no money. "What can I do?" {h.he} [thought|asked
        {h.himself}]. {h} sat down {outside} and thought. "I know! I will make {gift.a}!" {h.he}
        said at last. {h.He} worked all [afternoon|night] and put the present in a {color} box. In
        the morning, {h.he} ran to the house of {f}. "Happy birthday, {f}!" {h.he} said. {f} opened
        the box and [smiled|jumped for joy|could not believe {f.his} eyes]. "{gift.A}! It is the
        best present of all, because you made it," said {f}. [<end>|]""",
    ),
    # The bridge is broken.
    (
        "!swim !fly",
        "swim",
        """<open> <when>, {h} wanted to visit {h.his} {family}, who lived on the other side of the
        river. [{h.He} carried a basket of {fruit}.|] But the rain had broken the bridge, and the
        water was deep and [cold|fast]. "How can I cross the river?" {h.he} asked. Then {f} the
        {f.kind} put {f.his} head out of the water. "[I can help you|I know a way]. Sit on that log
        and hold on tight," said {f}. {h} [was a little afraid, but {h.he}|] sat on the log. {f}
        swam and pushed [with great care|as hard as {f.he} could] until they reached the other side.
        [<thanks>|"Thank you, {f}! Come and eat with us," said {h}. {h.His} {family} gave them warm
        soup and [bread|{fruit}].] <end>""",
    ),
    # Something is hard to learn.
    (
        "",
        "",
        """<open> {h.He} had one wish: {h.he} wanted to learn to {skill}. Everyone in the village
        could {skill}, but {h} [could not|did not know how]. {h.He} tried once, {h.he} tried twice,
        and [the others laughed|it went very badly]. "I will never learn," {h.he} said sadly. {f}
        the {f.kind} heard {h.him}. "Nobody learns in one day. [Try again|Come with me], and I will
        teach you," said {f}. They practiced together every [morning|afternoon]. [The first day was
        hard, but the second day was better.|] At the end of the week {h} could {skill} as well as
        {f}. Everyone clapped, and {h} felt [very proud|as tall as a tree]. "[You see|You did it]!"
        said {f}. [<end>|]""",
    ),
    # No rain for the garden.
    (
        "",
        "",
        """<open> In spring, {h} planted a {plant} seed behind the house. Every morning {h.he} [gave
        it water|went to look at it]. But then the days were hot and it did not rain. The little
        plant [was dying|bent its head]. "My poor plant is thirsty," said {h} sadly. <meet> "<calm>.
        There is water in the river, and I have a [big bucket|cart]," said {f}. [All that week|Day
        after day], they carried water from the river to the garden. [One morning|At last], they had
        the [biggest|most beautiful] {plant} in the village. "It is yours too, because you helped
        me," said {h}. [<end>|]""",
    ),
    # The small one saves the big one.
    (
        "!small",
        "small",
        """<open> <when>, {h.he} heard a small voice {outside}. "Help! Help!" cried the voice. {f.A}
        had fallen into a deep hole. {h} put a long branch into the hole, and the {f.kind} climbed
        out. "Thank you. My name is {f}, and one day I will help you too," said the {f.kind}. "[You?
        But you are so small|But you are so little]!" said {h}. [Some days|A week] later, {h} walked
        into a net and could not get out. {f} heard {h.him} [cry|shout], came running, and bit the
        ropes until they broke. "[You see|Now you know]! A small friend can do big things," said
        {f}. ["You were right," said {h}.|<end>]""",
    ),
    # Both want the same thing.
    (
        "",
        "",
        """<open> {h.His} best friend was {f} the {f.kind}. <when>, they found a [big|beautiful]
        {food} {outside}. "I saw it first!" shouted {h}. "No, it is mine!" shouted {f}. They pulled
        and pushed until they both fell into the mud. An old {m.kind} was watching them. "[Half of
        {food.a} with a friend is better than a whole {food} alone|Everything tastes better with a
        friend]," {m.he} said. ["I am sorry," said {h}. "I am sorry too," said {f}.|{h} and {f}
        looked at each other and [began to laugh|felt silly].] {h} cut the {food} in two and gave
        the bigger half to {f}. It was the best {food} they had ever eaten. [<moral>|And they were
        both very happy.|]""",
    ),
    # A cold house in winter.
    (
        "",
        "",
        """<open> It was winter, and snow covered the [fields|roofs|hills]. {h} had no more wood for
        the fire, and the house was getting cold. [{h.He} went out to look for wood, but the snow
        was too deep.|] {f} the {f.kind} looked out of the window. "How strange! There is no smoke
        over the house of {h}," {f.he} thought. {f.He} took some wood and a pot of soup and walked
        through the snow. "Who is there?" asked {h}. "It is me, {f}. I brought wood and hot soup,"
        said {f}. Soon the fire was burning. The two friends ate and told stories [until late|all
        night]. [The snow fell outside, but [inside it was warm|the house was warm].|{h} never
        forgot how kind {f} had been.]""",
    ),
    # The way home is lost.
    (
        "!fly",
        "fly",
        """<open> <when>, {h} followed a {color} butterfly into the forest. [{h.He} ran so fast that
        {h.he} did not look at the path.|] When the butterfly flew away, {h} looked around: all the
        trees looked the same. "I am lost," {h.he} said. [Night was falling|The sun was going down],
        and {h.he} was afraid. Then {h.he} heard wings above {h.his} head. It was {f} the {f.kind}.
        "<calm>. I can see your house from the sky. [Follow me|Come with me]," said {f}. {h}
        followed {f} [over the hill|along the river] until they saw a light. {h.His}
        [mother|father|{family}] was waiting at the door. "[Thank you|Thank you so much], {f}!" said {h}.
        [<end>|]""",
    ),
    # The moon in the pond.
    (
        "",
        "",
        """<open> One [clear|warm|quiet] night, {h} went for a walk [by|near] the pond. In the water
        {h.he} saw the moon. "Oh no! The moon fell into the water, and I must save it," {h.he} said.
        {h} ran home and came back with a [net|bucket|rope], but the moon [broke into pieces|always
        got away]. <meet> "What are you doing?" asked {f}. "I want to save the moon," said {h}.
        "Look up," said {f} [with a smile|and laughed softly]. {h} looked up, and there was the
        moon, high in the sky. The two friends sat in the grass and watched the stars [until
        late|for a long time]. [<moral>|]""",
    ),
)
