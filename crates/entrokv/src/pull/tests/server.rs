//! A loopback HTTP server whose every answer the test decides.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// What a client asked.
#[derive(Debug, Clone)]
pub(super) struct Request {
    /// `GET`, `HEAD` or `POST`.
    pub(super) method: String,
    /// Path with query.
    pub(super) path: String,
    headers: HashMap<String, String>,
    /// How many requests came before it.
    pub(super) index: usize,
}

impl Request {
    /// A header, by its lower-case name.
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// First byte of the range asked for.
    pub(super) fn range_start(&self) -> Option<usize> {
        self.header("range")?.strip_prefix("bytes=")?.split_once('-')?.0.parse().ok()
    }
}

/// What the server answers.
#[derive(Debug, Clone, Default)]
pub(super) struct Reply {
    /// Status code.
    pub(super) status: u16,
    /// Further headers; the length is added.
    pub(super) headers: Vec<(String, String)>,
    /// Body, not sent to `HEAD`.
    pub(super) body: Vec<u8>,
    /// Sends only so many bytes of the body, then does this.
    pub(super) stop: Option<(usize, Stop)>,
}

/// What a server does in the middle of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stop {
    /// Closes the connection.
    Cut,
    /// Says nothing more, for as long as the client waits.
    Stall,
}

impl Reply {
    /// An answer without further headers.
    pub(super) fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self { status, body: body.into(), ..Self::default() }
    }

    /// Adds a header.
    pub(super) fn header(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    /// Stops in the middle.
    pub(super) fn stop(mut self, after: usize, stop: Stop) -> Self {
        self.stop = Some((after, stop));
        self
    }

    /// The file, or the range of it that was asked for, as a good server sends it.
    pub(super) fn file(request: &Request, content: &[u8], etag: &str) -> Self {
        let quoted = format!("\"{etag}\"");
        let same = request.header("if-range").is_none_or(|condition| condition == quoted);
        match request.range_start() {
            Some(start) if same && start < content.len() => Self::new(206, &content[start..])
                .header("Content-Range", format!("bytes {start}-{}/{}", content.len() - 1, content.len())),
            Some(_) if same => Self::new(416, "").header("Content-Range", format!("bytes */{}", content.len())),
            _ => Self::new(200, content),
        }
        .header("ETag", quoted)
    }
}

/// A running server; stops when dropped.
pub(super) struct Server {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<Request>>>,
    stopped: Arc<AtomicBool>,
}

impl Server {
    /// Starts a server that answers every request with what `answer` says.
    pub(super) fn start(answer: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let stopped = Arc::new(AtomicBool::new(false));
        let answer = Arc::new(answer);
        let server = Self { address, requests: Arc::clone(&requests), stopped: Arc::clone(&stopped) };
        thread::spawn(move || {
            for stream in listener.incoming() {
                if stopped.load(Ordering::Relaxed) {
                    return;
                }
                let (requests, stopped, answer) = (Arc::clone(&requests), Arc::clone(&stopped), Arc::clone(&answer));
                // A client that hangs up makes the writes fail, which is no fault of the server's.
                thread::spawn(move || stream.and_then(|stream| serve(stream, &requests, &stopped, &*answer)));
            }
        });
        server
    }

    /// The URL of a path on this server.
    pub(super) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// The URL of a path on this server under another host name.
    pub(super) fn other_url(&self, path: &str) -> String {
        format!("http://localhost:{}{path}", self.address.port())
    }

    /// The requests so far.
    pub(super) fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.address); // wakes the listener
    }
}

fn serve(
    mut stream: TcpStream,
    requests: &Mutex<Vec<Request>>,
    stopped: &AtomicBool,
    answer: &dyn Fn(&Request) -> Reply,
) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut words = line.split_whitespace().map(str::to_owned);
    let (Some(method), Some(path)) = (words.next(), words.next()) else { return Ok(()) };
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.split_once(':') else { break };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let length = headers.get("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    reader.read_exact(&mut vec![0; length])?;
    let request = {
        let mut requests = requests.lock().unwrap();
        let request = Request { method, path, headers, index: requests.len() };
        requests.push(request.clone());
        request
    };
    let reply = answer(&request);
    let mut head = format!("HTTP/1.1 {} x\r\nContent-Length: {}\r\n", reply.status, reply.body.len());
    for (name, value) in &reply.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    stream.write_all(format!("{head}Connection: close\r\n\r\n").as_bytes())?;
    if request.method == "HEAD" {
        return Ok(());
    }
    let (len, stop) = reply.stop.map_or((reply.body.len(), Stop::Cut), |(len, stop)| (len, stop));
    stream.write_all(&reply.body[..len])?;
    stream.flush()?;
    if stop == Stop::Stall {
        stream.set_read_timeout(Some(Duration::from_millis(20)))?;
        // Nothing more comes from the client: a read ends when it hangs up.
        while !stopped.load(Ordering::Relaxed) && !matches!(stream.read(&mut [0; 1]), Ok(0)) {}
    }
    Ok(())
}
