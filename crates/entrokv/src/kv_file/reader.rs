//! From the bytes of a file to a sequence: nothing is believed before it has been compared.
//!
//! The bytes pass once. What a header claims is never allocated, only what is there; and what is wrong with a file is told of
//! a whole file alone: when anything does not fit, the rest is read for its checksum first, so that damage is called damage.

use std::io::Read;

use entrokv_cache::{CacheShape, PageIndex, PageKind, PageRecord};
use entrokv_kernels::codes::KeyConstants;
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde::Deserialize;

use super::checksum::{CHECKSUM_BYTES, HashingReader};
use super::header::METADATA_KEY;
use super::{Contents, FORMAT_VERSION, Header, KvFileError};

/// Bytes of a header at most: notes can be long, and nothing else in it is.
const MAX_HEADER_BYTES: u64 = 64 << 20;

/// A file that is being read.
pub(crate) struct KvFileReader<'a> {
    input: HashingReader<&'a mut dyn Read>,
    header: Header,
    metadata: Metadata,
    /// Names of the tensors not read yet, the next one last.
    names: Vec<String>,
    /// Bytes the header speaks of.
    wanted: u64,
}

/// The part of the header that every version has.
#[derive(Deserialize)]
struct Versioned {
    version: u64,
}

impl<'a> KvFileReader<'a> {
    /// Reads the header.
    ///
    /// # Errors
    /// [`KvFileError`]: it is none of ours, of another version, damaged, or contradicts itself.
    pub(crate) fn open(input: &'a mut dyn Read) -> Result<Self, KvFileError> {
        let mut input = HashingReader::new(input);
        let foreign = |why: &str| KvFileError::Foreign { why: why.to_owned() };
        let mut bytes = Vec::new();
        input.take(8, &mut bytes)?;
        let len =
            bytes.as_slice().try_into().map(u64::from_le_bytes).map_err(|_| foreign("it ends before a header"))?;
        if len > MAX_HEADER_BYTES {
            return Err(foreign("its first 8 bytes are no header's length"));
        }
        let mut text = Vec::new();
        input.take(len, &mut text)?;
        // What every file of ours begins with, a header being written without spaces.
        if !text.starts_with(format!(r#"{{"__metadata__":{{"{METADATA_KEY}":""#).as_bytes()) {
            return Err(foreign(&format!("its header does not begin with {METADATA_KEY}")));
        }
        if (text.len() as u64) < len {
            return Err(KvFileError::Truncated { got: input.bytes(), wanted: 8 + len });
        }
        match parse(&text) {
            Ok((header, metadata)) => {
                let mut names = metadata.offset_keys();
                names.reverse();
                let wanted = (8 + len).saturating_add(metadata.data_len() as u64);
                Ok(Self { input, header, metadata, names, wanted })
            }
            Err(error) if input.is_whole()? => Err(error),
            Err(_) => Err(KvFileError::Damaged { bytes: input.bytes() }),
        }
    }

    /// Its words.
    pub(crate) fn header(&self) -> &Header {
        &self.header
    }

    /// Reads everything but the pages, for a cache of `shape` that is stored as `cache_kind`.
    ///
    /// # Errors
    /// [`KvFileError`]: it is cut short, or contradicts itself.
    pub(crate) fn contents(&mut self, shape: &CacheShape, cache_kind: PageKind) -> Result<Contents, KvFileError> {
        let query_squares = match self.rows("queries.squares") {
            0 => Vec::new(),
            _ => {
                let heads = vec![shape.num_groups(), shape.head_dim];
                self.list("queries.squares", Dtype::F64, heads, f64::from_le_bytes)?
            }
        };
        let tokens = self.u32s("tokens", None)?;
        let lens = self.u32s("tables", Some(shape.num_groups()))?;
        let num_pages = lens.iter().map(|&len| len as usize).sum();
        let index = self.u32s("pages.index", Some(num_pages))?;
        let filled = self.u32s("pages.len", Some(num_pages))?;
        let kind = self.u32s("pages.kind", Some(num_pages))?;
        let positions = match self.rows("pages.positions") {
            0 => Vec::new(),
            _ => self.u32s("pages.positions", Some(filled.iter().map(|&len| len as usize).sum()))?,
        };
        let constants = match cache_kind.needs_constants() {
            true => self.constants(shape)?,
            false => Vec::new(),
        };
        let fits = match (cache_kind.needs_constants(), constants.is_empty(), query_squares.is_empty()) {
            (true, true, true) => shape.num_global_groups() == 0,
            (true, no_constants, no_squares) => no_constants != no_squares,
            (false, no_constants, no_squares) => no_constants && no_squares,
        };
        if !fits {
            let what = format!("constants of keys, or what they are taken from, do not go with {cache_kind}");
            return Err(malformed(what));
        }
        let kinds = self.kinds(cache_kind)?;
        if kinds.contains(&cache_kind) && cache_kind.needs_constants() && constants.is_empty() {
            return Err(malformed(format!("pages of kind {cache_kind} without the constants of their keys")));
        }
        let mut positions = positions.as_slice();
        let mut pages = index.iter().zip(&filled).zip(&kind).map(|((&index, &len), &kind)| {
            let kind =
                kinds.get(kind as usize).ok_or_else(|| malformed(format!("page kind {kind} of {}", kinds.len())))?;
            let own = positions.split_off(..(len as usize).min(positions.len())).unwrap_or_default();
            let implied = u64::from(index) * shape.page_size as u64..;
            let is_compacted = own.iter().zip(implied).any(|(own, implied)| u64::from(*own) != implied);
            let positions = is_compacted.then(|| own.into());
            Ok(PageRecord { index: PageIndex(index), kind: *kind, len, positions })
        });
        let mut tables = Vec::with_capacity(lens.len());
        for len in lens {
            tables.push(pages.by_ref().take(len as usize).collect::<Result<Vec<_>, KvFileError>>()?);
        }
        if Contents::kinds_of(&tables) != kinds {
            return Err(malformed("it lists kinds of page that it has no page of"));
        }
        for kind in kinds {
            let pages = tables.iter().flatten().filter(|page| page.kind == kind).count();
            self.claim(&format!("payload.{kind}"), Dtype::U8, &[pages, kind.page_bytes(shape) as usize])?;
        }
        self.claim("checksum", Dtype::U8, &[CHECKSUM_BYTES])?;
        match self.names.last() {
            None => Ok(Contents { header: self.header.clone(), tokens, tables, constants, query_squares }),
            Some(name) => Err(malformed(format!("tensor {name:?} is none of this format's, or out of its order"))),
        }
    }

    /// Reads the next `len` bytes of the pages into `out`, which is cleared first.
    pub(crate) fn page(&mut self, len: u64, out: &mut Vec<u8>) -> Result<(), KvFileError> {
        out.clear();
        self.read(len, out)
    }

    /// Reads the end.
    ///
    /// # Errors
    /// [`KvFileError`]: it is damaged, cut short, or longer than its header says.
    pub(crate) fn finish(&mut self) -> Result<(), KvFileError> {
        let is_whole = self.input.is_whole()?;
        let (got, wanted) = (self.input.bytes(), self.wanted);
        if got < wanted {
            Err(KvFileError::Truncated { got, wanted })
        } else if got > wanted {
            Err(KvFileError::Surplus { got, wanted })
        } else if !is_whole {
            Err(KvFileError::Damaged { bytes: got })
        } else {
            Ok(())
        }
    }

    /// What is to be told of a file that was refused for `error`: that it is not whole, if it is not.
    pub(crate) fn blame(&mut self, error: KvFileError) -> KvFileError {
        match error {
            KvFileError::Truncated { .. } | KvFileError::Io(_) => error,
            error => self.finish().err().unwrap_or(error),
        }
    }

    /// The constants of the keys of every global KV group, if they are there.
    fn constants(&mut self, shape: &CacheShape) -> Result<Vec<KeyConstants>, KvFileError> {
        if self.rows("keys.centre") == 0 {
            return Ok(Vec::new());
        }
        let heads = || vec![shape.num_global_groups(), shape.head_dim];
        let centre = self.list("keys.centre", Dtype::F32, heads(), f32::from_le_bytes)?;
        let scale = self.list("keys.scale", Dtype::F32, heads(), f32::from_le_bytes)?;
        if !(centre.iter().all(|x| x.is_finite()) && scale.iter().all(|x| x.is_finite() && *x > 0.0)) {
            return Err(malformed("a constant of its keys is no number or no scale"));
        }
        let parts = centre.chunks_exact(shape.head_dim).zip(scale.chunks_exact(shape.head_dim));
        Ok(parts.map(|(centre, scale)| KeyConstants::new(centre.to_vec(), scale.to_vec())).collect())
    }

    /// The kinds that the header lists: what pages are written as and what they become.
    fn kinds(&self, cache_kind: PageKind) -> Result<Vec<PageKind>, KvFileError> {
        let possible = [cache_kind.written_as(), cache_kind];
        let kind = |text: &String| {
            let kind = possible.into_iter().find(|kind| kind.to_string() == *text);
            kind.ok_or_else(|| malformed(format!("pages of kind {text:?} in a cache of type {cache_kind}")))
        };
        self.header.kinds.iter().map(kind).collect()
    }

    /// Rows of the next tensor, if it is this one; 0 if it is another: a tensor without elements is left out.
    fn rows(&self, name: &str) -> usize {
        let is_next = self.names.last().is_some_and(|next| next == name);
        let info = self.metadata.info(name).filter(|_| is_next);
        info.and_then(|info| info.shape.first().copied()).unwrap_or(0)
    }

    /// Takes the next tensor for this one; returns its bytes.
    fn claim(&mut self, name: &str, dtype: Dtype, shape: &[usize]) -> Result<u64, KvFileError> {
        if shape.contains(&0) {
            return Ok(0);
        }
        let info = self.metadata.info(name).filter(|_| self.names.last().is_some_and(|next| next == name));
        let Some(info) = info else {
            let got = self.names.last().map_or("nothing", String::as_str);
            return Err(malformed(format!("tensor {name:?} is not where it belongs, {got:?} is")));
        };
        if info.dtype != dtype || *info.shape != *shape {
            let (got, got_shape) = (info.dtype, &info.shape);
            return Err(malformed(format!("tensor {name:?} is {got} {got_shape:?}, and not {dtype} {shape:?}")));
        }
        let bytes = (info.data_offsets.1 - info.data_offsets.0) as u64;
        self.names.pop();
        Ok(bytes)
    }

    /// Reads a tensor of numbers.
    fn list<T, const N: usize>(
        &mut self,
        name: &str,
        dtype: Dtype,
        shape: Vec<usize>,
        number: fn([u8; N]) -> T,
    ) -> Result<Vec<T>, KvFileError> {
        let len = self.claim(name, dtype, &shape)?;
        let mut bytes = Vec::new();
        self.read(len, &mut bytes)?;
        Ok(bytes.as_chunks().0.iter().map(|bytes| number(*bytes)).collect())
    }

    /// Reads a list of `len` numbers, or of as many as there are.
    fn u32s(&mut self, name: &str, len: Option<usize>) -> Result<Vec<u32>, KvFileError> {
        let len = len.unwrap_or_else(|| self.rows(name));
        self.list(name, Dtype::U32, vec![len], u32::from_le_bytes)
    }

    fn read(&mut self, len: u64, out: &mut Vec<u8>) -> Result<(), KvFileError> {
        let before = out.len() as u64;
        self.input.take(len, out)?;
        if out.len() as u64 - before < len {
            return Err(KvFileError::Truncated { got: self.input.bytes(), wanted: self.wanted });
        }
        Ok(())
    }
}

fn malformed(what: impl Into<String>) -> KvFileError {
    KvFileError::Malformed(what.into())
}

fn parse(text: &[u8]) -> Result<(Header, Metadata), KvFileError> {
    let metadata: Metadata = serde_json::from_slice(text).map_err(|error| malformed(error.to_string()))?;
    let words = metadata.metadata().as_ref().and_then(|words| words.get(METADATA_KEY));
    let words = words.ok_or_else(|| malformed(format!("its header has no {METADATA_KEY}")))?;
    let Versioned { version } = serde_json::from_str(words).map_err(|error| malformed(error.to_string()))?;
    if version != u64::from(FORMAT_VERSION) {
        return Err(KvFileError::Version { got: version });
    }
    let header = serde_json::from_str(words).map_err(|error| malformed(error.to_string()))?;
    Ok((header, metadata))
}
