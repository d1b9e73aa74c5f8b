//! When a policy evicts.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

/// When a policy evicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Schedule {
    /// At the prompt's end only; later tokens are appended and stay.
    Once,
    /// At the prompt's end and whenever a page is opened after it, so that the budget holds after every step.
    Rolling,
    /// As [`Schedule::Rolling`], but when a page is to be opened and there is none, room is made for this many tokens at
    /// once: as many whole pages, or what the pins leave.
    Every(NonZeroU32),
    /// As [`Schedule::Rolling`], and while a prompt is read too: at every multiple of so many positions, where all happens
    /// that happens at a prompt's end. What is held while reading is then the budget and a chunk at most.
    PerChunk(NonZeroU32),
    /// Once, and not before whoever runs the sequence says that it may: after an answer, so that a pass over the text delays no
    /// token. Until then nothing goes, nor before the sequence has so many tokens: what little there would be of a short one is
    /// soon not what a longer one needs.
    AfterAnswer(u32),
}

impl Schedule {
    /// Its spellings, in words.
    pub(crate) const EXPECTED: &'static str = "once, rolling, every:N or per_chunk:N with N tokens, 1 or more, \
         per_chunk, which is per_chunk:512, after_answer, or after_answer:N, once there are N tokens";

    /// Positions between two evictions of a bare `per_chunk`: what the engine reads in a step by default.
    const CHUNK: NonZeroU32 = NonZeroU32::new(512).expect("512 is not 0");

    /// Whether pages go while decoding, so that rows of generated tokens are worth asking for.
    #[must_use]
    pub fn goes_on(self) -> bool {
        !matches!(self, Self::Once | Self::AfterAnswer(_))
    }

    /// Pages of `page_size` tokens to make room for when one is to be opened and there is none.
    #[must_use]
    pub fn pages_at_once(self, page_size: usize) -> usize {
        match self {
            Self::Every(tokens) => (tokens.get() as usize).div_ceil(page_size),
            Self::Once | Self::Rolling | Self::PerChunk(_) | Self::AfterAnswer(_) => 1,
        }
    }

    /// Where reading from `position` on pauses to evict: the next multiple of the chunk, if there is a chunk.
    #[must_use]
    pub fn pause_after(self, position: usize) -> Option<usize> {
        match self {
            Self::PerChunk(tokens) => {
                let chunk = tokens.get() as usize;
                Some((position / chunk + 1).saturating_mul(chunk))
            }
            Self::Once | Self::Rolling | Self::Every(_) | Self::AfterAnswer(_) => None,
        }
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Once => f.write_str("once"),
            Self::Rolling => f.write_str("rolling"),
            Self::Every(tokens) => write!(f, "every:{tokens}"),
            Self::PerChunk(tokens) => write!(f, "per_chunk:{tokens}"),
            Self::AfterAnswer(0) => f.write_str("after_answer"),
            Self::AfterAnswer(tokens) => write!(f, "after_answer:{tokens}"),
        }
    }
}

impl FromStr for Schedule {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let tokens = |text: &str| text.parse::<NonZeroU32>().map_err(|_| ());
        match text.split_once(':') {
            None if text == "once" => Ok(Self::Once),
            None if text == "rolling" => Ok(Self::Rolling),
            None if text == "after_answer" => Ok(Self::AfterAnswer(0)),
            None if text == "per_chunk" => Ok(Self::PerChunk(Self::CHUNK)),
            Some(("every", number)) => tokens(number).map(Self::Every),
            Some(("per_chunk", number)) => tokens(number).map(Self::PerChunk),
            Some(("after_answer", number)) => tokens(number).map(|tokens| Self::AfterAnswer(tokens.get())),
            _ => Err(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules_print_what_they_parse_from() {
        for text in ["once", "rolling", "every:1", "every:128", "per_chunk:64", "after_answer", "after_answer:512"] {
            assert_eq!(text.parse::<Schedule>().map(|schedule| schedule.to_string()).as_deref(), Ok(text));
        }
        assert_eq!("per_chunk".parse(), "per_chunk:512".parse::<Schedule>());
        for text in [
            "",
            "every",
            "every:0",
            "every:-1",
            "per_chunk:0",
            "per_chunk:",
            "rolling:3",
            "once ",
            "Once",
            "after_answer:0",
        ] {
            assert_eq!(text.parse::<Schedule>(), Err(()), "{text}");
        }
    }

    #[test]
    fn reading_pauses_at_multiples_of_the_chunk_and_room_comes_in_whole_pages() {
        let schedule = |text: &str| text.parse::<Schedule>().unwrap();
        let pauses = [0, 63, 64, 65, usize::MAX - 1].map(|position| schedule("per_chunk:64").pause_after(position));
        assert_eq!(pauses, [64, 64, 128, 128, usize::MAX].map(Some));
        assert_eq!(schedule("rolling").pause_after(3), None);
        let pages = ["once", "rolling", "every:1", "every:16", "every:17", "per_chunk:64"]
            .map(|text| schedule(text).pages_at_once(16));
        assert_eq!(pages, [1, 1, 1, 1, 2, 1]);
    }
}
