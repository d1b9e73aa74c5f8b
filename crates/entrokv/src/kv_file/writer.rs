//! From a sequence to the bytes of its file, a page at a time.

use std::collections::HashMap;
use std::io::{self, Write};

use entrokv_cache::CacheShape;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::checksum::{CHECKSUM_BYTES, HashingWriter};
use super::contents::{Contents, List};
use super::header::METADATA_KEY;

/// Data begin at a multiple of so many bytes, so that numbers can be read in place.
const ALIGNMENT: usize = 8;

/// Writes `contents`, whose pages `page(group, place, out)` appends to `out`, and returns the length of the file.
pub(crate) fn write(
    out: &mut dyn Write,
    contents: &Contents,
    shape: &CacheShape,
    page: &mut dyn FnMut(usize, usize, &mut Vec<u8>),
) -> io::Result<u64> {
    let lists = contents.lists(shape);
    let mut out = HashingWriter::new(out);
    let header = header(contents, shape, &lists);
    out.put(&(header.len() as u64).to_le_bytes())?;
    out.put(&header)?;
    for list in lists {
        out.put(&list.bytes)?;
    }
    let mut bytes = Vec::new();
    for (group, place, record) in contents.pages() {
        bytes.clear();
        page(group, place, &mut bytes);
        assert_eq!(bytes.len() as u64, record.kind.page_bytes(shape), "the bytes of a page");
        out.put(&bytes)?;
    }
    out.finish()
}

/// The header of the container.
fn header(contents: &Contents, shape: &CacheShape, lists: &[List]) -> Vec<u8> {
    let mut tensors = Vec::new();
    let mut end = 0;
    let mut add = |name: String, dtype: Dtype, shape: Vec<usize>, bytes: usize| {
        tensors.push((name, TensorInfo { dtype, shape, data_offsets: (end, end + bytes) }));
        end += bytes;
    };
    for list in lists {
        add(list.name.to_owned(), list.dtype, list.shape.clone(), list.bytes.len());
    }
    for kind in Contents::kinds_of(&contents.tables) {
        let pages = contents.tables.iter().flatten().filter(|page| page.kind == kind).count();
        let page_bytes = kind.page_bytes(shape) as usize;
        add(format!("payload.{kind}"), Dtype::U8, vec![pages, page_bytes], pages * page_bytes);
    }
    add("checksum".to_owned(), Dtype::U8, vec![CHECKSUM_BYTES], CHECKSUM_BYTES);

    // One key: the map of the container has no order, and equal sequences are to give equal files.
    let words = serde_json::to_string(&contents.header).expect("a header is a plain record");
    let words = HashMap::from([(METADATA_KEY.to_owned(), words)]);
    let metadata = Metadata::new(Some(words), tensors).expect("the tensors lie side by side");
    let mut header = serde_json::to_vec(&metadata).expect("so is the container's");
    header.resize(header.len().next_multiple_of(ALIGNMENT), b' ');
    header
}
