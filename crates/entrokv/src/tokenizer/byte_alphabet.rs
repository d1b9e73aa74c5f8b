//! The printable stand-ins that byte-level vocabularies are written in.
//!
//! GPT-2 gave every byte a visible character, so that its vocabulary file could be text: bytes that print stand for
//! themselves, the 68 others take the characters from U+0100 on, in order. A space is written `Ġ`, a newline `Ċ`.

/// Stand-ins lie below this code point: 256, and one for each of the 68 bytes that do not stand for themselves.
const NUM_CODES: usize = 256 + 68;

const CHARS: [char; 256] = chars();
const BYTES: [Option<u8>; NUM_CODES] = bytes();

/// The character that stands for `byte`.
pub(super) fn char_of(byte: u8) -> char {
    CHARS[usize::from(byte)]
}

/// The byte that `character` stands for, `None` for a character outside the alphabet.
pub(super) fn byte_of(character: char) -> Option<u8> {
    BYTES.get(u32::from(character) as usize).copied().flatten()
}

const fn chars() -> [char; 256] {
    let mut chars = ['\0'; 256];
    let mut stand_ins = 0;
    let mut byte = 0;
    while byte < 256 {
        let prints = matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
        let code = if prints { byte as u32 } else { 256 + stand_ins };
        chars[byte] = match char::from_u32(code) {
            Some(character) => character,
            None => unreachable!(),
        };
        stand_ins += !prints as u32;
        byte += 1;
    }
    chars
}

const fn bytes() -> [Option<u8>; NUM_CODES] {
    let mut bytes = [None; NUM_CODES];
    let mut byte = 0;
    while byte < 256 {
        bytes[CHARS[byte] as usize] = Some(byte as u8);
        byte += 1;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_a_character_of_its_own() {
        for byte in 0..=u8::MAX {
            assert_eq!(byte_of(char_of(byte)), Some(byte));
        }
        assert_eq!(BYTES.iter().flatten().count(), 256);
    }

    #[test]
    fn the_known_stand_ins_are_the_usual_ones() {
        assert_eq!(
            [b' ', b'\n', b'\t', 0, 0x7F, 0xAD, b'A', 0xFF].map(char_of),
            ['Ġ', 'Ċ', 'ĉ', 'Ā', 'ġ', 'Ń', 'A', 'ÿ']
        );
        assert_eq!([' ', '\n', '一', '\u{144}', '\u{AD}'].map(byte_of), [None; 5]);
    }
}
