//! A loopback HTTP server that may fall silent in the middle of a file.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

/// What one request is answered with.
pub(crate) struct Answer {
    /// Length that the header announces.
    pub(crate) announced: u64,
    /// What is sent of it; where it is less than announced the server then says nothing more.
    pub(crate) body: Vec<u8>,
}

impl Answer {
    /// The whole file.
    pub(crate) fn whole(body: &[u8]) -> Self {
        Self { announced: body.len() as u64, body: body.to_vec() }
    }

    /// The first half, then silence.
    pub(crate) fn half(body: &[u8]) -> Self {
        Self { announced: body.len() as u64, body: body[..body.len() / 2].to_vec() }
    }
}

/// Answers one request after another, each as the list says; a request past its end gets no connection.
pub(crate) struct Server {
    address: SocketAddr,
    sent: Receiver<()>,
}

impl Server {
    /// Starts to listen.
    pub(crate) fn start(answers: Vec<Answer>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, sent) = mpsc::channel();
        thread::spawn(move || {
            for answer in answers {
                let Ok((stream, _)) = listener.accept() else { return };
                let sender = sender.clone();
                // A client that hangs up is no failure.
                thread::spawn(move || serve(stream, &answer, &sender).ok());
            }
        });
        Self { address, sent }
    }

    /// The URL of the file.
    pub(crate) fn url(&self) -> String {
        format!("http://{}/tiny.gguf", self.address)
    }

    /// Waits until one more answer is on its way.
    pub(crate) fn wait(&self) {
        self.sent.recv().unwrap();
    }
}

fn serve(mut stream: TcpStream, answer: &Answer, sent: &Sender<()>) -> std::io::Result<()> {
    for line in BufReader::new(stream.try_clone()?).lines() {
        if line?.is_empty() {
            break;
        }
    }
    write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", answer.announced)?;
    stream.write_all(&answer.body)?;
    let _ = sent.send(());
    if (answer.body.len() as u64) < answer.announced {
        // Nothing more comes from the client: this ends when it hangs up.
        stream.read_to_end(&mut Vec::new())?;
    }
    Ok(())
}
