//! The template's text, made ready for the compiler.

/// Returns `source` with its line breaks as Jinja reads them and without what only training needs.
///
/// 1. `\r\n` and `\r` become `\n`, as Jinja's lexer does.
/// 2. `{% generation %}` .. `{% endgeneration %}`, which mark the assistant's words for the loss, become an empty `with`
///    block: the same scope, the same whitespace control, nothing else. Comments, strings and `raw` blocks stay.
/// 3. The line break after `{% raw %}` is doubled: the compiler trims one, Jinja none.
pub(super) fn prepare(source: &str) -> String {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut prepared = String::with_capacity(source.len());
    let mut rest = source.as_str();
    while let Some((before, tag, after)) = next_tag(rest) {
        prepared.push_str(before);
        rest = after;
        match tag.name() {
            "generation" => prepared.push_str(&tag.renamed("with")),
            "endgeneration" => prepared.push_str(&tag.renamed("endwith")),
            "raw" => {
                prepared.push_str(tag.0);
                if after.starts_with('\n') && !tag.0.ends_with("-%}") {
                    prepared.push('\n');
                }
                let (raw, after) = after.split_at(raw_len(after));
                prepared.push_str(raw);
                rest = after;
            }
            _ => prepared.push_str(tag.0),
        }
    }
    prepared.push_str(rest);
    prepared
}

/// Length of the text up to the first `{% endraw %}`; nothing else ends a raw block, no quote or brace opens anything.
fn raw_len(raw: &str) -> usize {
    let ends = |at: &usize| {
        let tag = raw[at + 2..].trim_start_matches(['-', '+']).trim_start();
        tag.strip_prefix("endraw").is_some_and(|tag| tag.trim_start().trim_start_matches(['-', '+']).starts_with("%}"))
    };
    raw.match_indices("{%").map(|(at, _)| at).find(ends).unwrap_or(raw.len())
}

/// A whole `{% .. %}`, `{{ .. }}` or `{# .. #}`.
struct Tag<'a>(&'a str);

impl Tag<'_> {
    /// The words of a `{% .. %}` without whitespace control; empty for the other two.
    fn name(&self) -> &str {
        let words = self.0.strip_prefix("{%").and_then(|tag| tag.strip_suffix("%}")).unwrap_or_default();
        words.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim()
    }

    fn renamed(&self, name: &str) -> String {
        self.0.replace(self.name(), name)
    }
}

/// Splits off the first complete tag; `None` when there is none (the compiler says what is wrong with an open one).
fn next_tag(source: &str) -> Option<(&str, Tag<'_>, &str)> {
    let start = source.match_indices('{').map(|(at, _)| at).find(|at| {
        let opening = &source.as_bytes()[*at..];
        opening.starts_with(b"{%") || opening.starts_with(b"{{") || opening.starts_with(b"{#")
    })?;
    let tag = &source[start..];
    let inside = &tag[2..];
    let inside_len = match tag.as_bytes()[1] {
        b'#' => inside.find("#}")?,
        b'%' => end_of_code(inside, "%}")?,
        _ => end_of_code(inside, "}}")?,
    };
    let (tag, after) = tag.split_at(inside_len + 4);
    Some((&source[..start], Tag(tag), after))
}

/// Finds `closing` outside of string literals and, for `}}`, outside of braces.
fn end_of_code(code: &str, closing: &str) -> Option<usize> {
    let (mut quote, mut escaped, mut num_open) = (None, false, 0usize);
    for (at, letter) in code.char_indices() {
        match (quote, letter) {
            (Some(_), _) if escaped => escaped = false,
            (Some(_), '\\') => escaped = true,
            (Some(open), letter) if open == letter => quote = None,
            (Some(_), _) => {}
            (None, '"' | '\'') => quote = Some(letter),
            (None, _) if num_open == 0 && code[at..].starts_with(closing) => return Some(at),
            (None, '{') => num_open += 1,
            (None, '}') => num_open = num_open.saturating_sub(1),
            (None, _) => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::prepare;

    #[test]
    fn generation_marks_become_empty_scopes() {
        let cases = [
            ("{% generation %}x{% endgeneration %}", "{% with %}x{% endwith %}"),
            ("{%- generation -%}\nx\n{%- endgeneration +%}", "{%- with -%}\nx\n{%- endwith +%}"),
            ("{%generation%}x{%endgeneration%}", "{%with%}x{%endwith%}"),
        ];
        for (source, prepared) in cases {
            assert_eq!(prepare(source), prepared);
        }
    }

    #[test]
    fn the_line_break_after_raw_is_doubled_unless_the_tag_eats_it() {
        assert_eq!(prepare("{% raw %}\n{{ x\n{% endraw %}\n"), "{% raw %}\n\n{{ x\n{% endraw %}\n");
        assert_eq!(prepare("{% raw -%}\n{{ x\n{% endraw %}\n"), "{% raw -%}\n{{ x\n{% endraw %}\n");
    }

    #[test]
    fn everything_else_stays() {
        let cases = [
            "",
            "plain { text } %} }}",
            "{{ \"{% generation %}\" }}",
            "{{ '{% generation %}\\'{% generation %}' }}",
            "{# {% generation %} #}",
            "{% raw %}{% generation %}{{ {% endgeneration %}{%- endraw -%}",
            "{% raw %}{% generation %}{% endrawer %}",
            "{% if generation %}{{ {'a': {'b': 1}} }}{% endif %}",
            "{% set x = '%}' %}{% set generation = x %}",
            "an open {% generation",
            "an open {{ '}}",
            "日本 {{ '日' }} {",
        ];
        for source in cases {
            assert_eq!(prepare(source), source);
        }
    }

    #[test]
    fn marks_after_a_raw_block_or_a_map_are_found() {
        assert_eq!(
            prepare("{% raw %}{{ '{% endraw %}{{ {'a': {}} }}{% generation %}"),
            "{% raw %}{{ '{% endraw %}{{ {'a': {}} }}{% with %}"
        );
    }

    #[test]
    fn line_breaks_are_normalised() {
        assert_eq!(prepare("a\r\nb\rc\n"), "a\nb\nc\n");
    }
}
