//! Text that goes on and on and says nothing anybody would ask about: prose, manuals, code, and a logbook by turns.

use super::dice::Dice;

const PEOPLE: [&str; 14] = [
    "the ferryman",
    "my aunt",
    "an old sailor",
    "the schoolmaster",
    "her brother",
    "the baker's wife",
    "a stranger",
    "the surveyor",
    "our neighbour",
    "the youngest of them",
    "the innkeeper",
    "a travelling doctor",
    "the captain",
    "nobody",
];
const DEEDS: [&str; 16] = [
    "walked down to",
    "spoke at length about",
    "had never cared for",
    "looked back at",
    "painted",
    "remembered",
    "came home from",
    "waited beside",
    "wrote a letter concerning",
    "turned away from",
    "was fond of",
    "dreamt of",
    "had lost the way to",
    "counted the steps to",
    "told the children of",
    "kept watch over",
];
const SIGHTS: [&str; 18] = [
    "the orchard",
    "a row of poplars",
    "the river in flood",
    "an empty market",
    "the lighthouse",
    "the long wall",
    "a field of barley",
    "the old bridge",
    "a cart without wheels",
    "the chapel roof",
    "the marshes",
    "a broken fence",
    "the weather",
    "a train that had gone",
    "the sound of bells",
    "the snow on the pass",
    "a garden gate",
    "the other shore",
];
const TIMES: [&str; 12] = [
    "In the morning",
    "That winter",
    "Before the rain",
    "After supper",
    "On the third day",
    "At low tide",
    "Some years later",
    "When the wind had turned",
    "Towards evening",
    "All through the summer",
    "Once, in March",
    "Long before dawn",
];
const ASIDES: [&str; 14] = [
    "though the road was bad",
    "as people there still do",
    "and thought no more of it",
    "with a basket on one arm",
    "while the dog slept",
    "for want of anything better",
    "without a word",
    "in spite of the cold",
    "as if it had always been so",
    "which surprised no one",
    "and the kettle boiled over",
    "under a pale sky",
    "so the story goes",
    "humming an old tune",
];

const PARTS: [&str; 16] = [
    "pump",
    "filter",
    "bearing",
    "upper valve",
    "drive belt",
    "cooling fan",
    "gasket",
    "pressure gauge",
    "feed roller",
    "control cable",
    "housing",
    "coupling",
    "fuse",
    "lower bracket",
    "sensor",
    "drain plug",
];
const HANDLINGS: [&str; 12] = [
    "removed",
    "cleaned",
    "tightened",
    "replaced",
    "greased",
    "inspected",
    "lifted",
    "aligned",
    "tested",
    "rinsed",
    "unscrewed",
    "marked",
];
const CONDITIONS: [&str; 12] = [
    "the motor is running",
    "the lamp is lit",
    "the tank is empty",
    "both screws are loose",
    "the cover is open",
    "there is any pressure left",
    "the oil is warm",
    "the belt shows cracks",
    "the needle stands still",
    "water drips from below",
    "the surface is dry",
    "a second person is present",
];

const VERBS: [&str; 12] =
    ["load", "merge", "scan", "push", "split", "check", "fold", "parse", "drain", "index", "copy", "trim"];
const NOUNS: [&str; 14] = [
    "buffer", "record", "window", "cursor", "table", "chunk", "entry", "header", "queue", "label", "frame", "span",
    "bucket", "range",
];
const STATIONS: [&str; 10] = [
    "pier",
    "north mole",
    "signal house",
    "slipway",
    "fuel dock",
    "breakwater",
    "customs shed",
    "dry dock",
    "fish market",
    "inner basin",
];
const EVENTS: [&str; 14] = [
    "all quiet",
    "two trawlers in",
    "fog, visibility poor",
    "ferry late",
    "lamp trimmed",
    "crane stopped for repairs",
    "swell from the west",
    "ropes doubled",
    "crew relieved",
    "barometer falling",
    "dredger at work",
    "buoy adrift, recovered",
    "ice at the edges",
    "tug alongside",
];
const WINDS: [&str; 8] = ["north", "north-east", "east", "south-east", "south", "south-west", "west", "north-west"];

/// Paragraph after paragraph.
pub(super) struct Filler {
    dice: Dice,
    /// Which kind comes next.
    turn: usize,
}

impl Filler {
    /// The text that `dice` leads to.
    pub(super) fn new(mut dice: Dice) -> Self {
        let turn = dice.below(4);
        Self { dice, turn }
    }

    fn prose(&mut self) -> String {
        let dice = &mut self.dice;
        match dice.below(5) {
            0 => format!(
                "{} {} {} {}, {}. ",
                dice.pick(&TIMES),
                dice.pick(&PEOPLE),
                dice.pick(&DEEDS),
                dice.pick(&SIGHTS),
                dice.pick(&ASIDES)
            ),
            1 => format!(
                "There was {}, and behind it {}; {} {} both. ",
                dice.pick(&SIGHTS),
                dice.pick(&SIGHTS),
                dice.pick(&PEOPLE),
                dice.pick(&DEEDS)
            ),
            2 => capitalised(format!(
                "{} {} {}, {}. ",
                dice.pick(&PEOPLE),
                dice.pick(&DEEDS),
                dice.pick(&SIGHTS),
                dice.pick(&ASIDES)
            )),
            3 => format!(
                "\"I {} {} once,\" said {}, {}. ",
                dice.pick(&DEEDS),
                dice.pick(&SIGHTS),
                dice.pick(&PEOPLE),
                dice.pick(&ASIDES)
            ),
            _ => format!(
                "{} it was {} that {} {}. ",
                dice.pick(&TIMES),
                dice.pick(&PEOPLE),
                dice.pick(&DEEDS),
                dice.pick(&SIGHTS)
            ),
        }
    }

    fn manual(&mut self) -> String {
        let dice = &mut self.dice;
        match dice.below(4) {
            0 => format!(
                "The {} must not be {} while {}. ",
                dice.pick(&PARTS),
                dice.pick(&HANDLINGS),
                dice.pick(&CONDITIONS)
            ),
            1 => format!(
                "If {}, the {} is {} first and the {} afterwards. ",
                dice.pick(&CONDITIONS),
                dice.pick(&PARTS),
                dice.pick(&HANDLINGS),
                dice.pick(&PARTS)
            ),
            2 => format!(
                "A {} that has been {} needs no further care unless {}. ",
                dice.pick(&PARTS),
                dice.pick(&HANDLINGS),
                dice.pick(&CONDITIONS)
            ),
            _ => format!(
                "Make sure that {} before the {} is {} or the {} is {}. ",
                dice.pick(&CONDITIONS),
                dice.pick(&PARTS),
                dice.pick(&HANDLINGS),
                dice.pick(&PARTS),
                dice.pick(&HANDLINGS)
            ),
        }
    }

    fn code(&mut self) -> String {
        let dice = &mut self.dice;
        let (verb, noun) = (dice.pick(&VERBS), dice.pick(&NOUNS));
        let (other, third) = (dice.pick(&NOUNS), dice.pick(&NOUNS));
        let body = match dice.below(3) {
            0 => format!(
                "    for {other} in {noun}.{}s() {{\n        {third}.{}({other});\n    }}\n",
                dice.pick(&NOUNS),
                dice.pick(&VERBS)
            ),
            1 => format!(
                "    if {noun}.is_empty() {{\n        return None;\n    }}\n    let {other} = {noun}.{}({third})?;\n",
                dice.pick(&VERBS)
            ),
            _ => format!(
                "    let {other} = {noun}.{}();\n    {third}.{}(&{other}, {noun}.{}());\n",
                dice.pick(&VERBS),
                dice.pick(&VERBS),
                dice.pick(&VERBS)
            ),
        };
        format!("fn {verb}_{noun}({noun}: &{}, {third}: &mut {}) {{\n{body}}}\n", title(noun), title(third))
    }

    fn log(&mut self) -> String {
        let dice = &mut self.dice;
        format!(
            "{:02}:{:02} {}: {}, wind {}.\n",
            dice.below(24),
            dice.below(60),
            dice.pick(&STATIONS),
            dice.pick(&EVENTS),
            dice.pick(&WINDS)
        )
    }
}

impl Iterator for Filler {
    type Item = String;

    /// The next paragraph, with an empty line behind it.
    fn next(&mut self) -> Option<String> {
        let kind: fn(&mut Self) -> String = [Self::prose, Self::manual, Self::code, Self::log][self.turn % 4];
        let sentences = if self.turn % 4 == 2 { 1 } else { 4 + self.dice.below(4) };
        self.turn += 1;
        let text: String = (0..sentences).map(|_| kind(self)).collect();
        Some(format!("{}\n\n", text.trim_end()))
    }
}

fn title(word: &str) -> String {
    capitalised(word.to_owned())
}

fn capitalised(mut text: String) -> String {
    if let Some(first) = text.get_mut(..1) {
        first.make_ascii_uppercase();
    }
    text
}
